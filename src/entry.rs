//! What a service enqueues.

use std::fmt;

use chrono::{DateTime, SubsecRound, Utc};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::error::StoreError;
use crate::id::{CommandId, OutboxId};
use crate::status::OutboxStatus;

/// One external effect that awaits dispatch.
///
/// ```
/// use diesel_outbox::{CommandId, OutboxEntry};
/// use serde_json::json;
///
/// let command = CommandId::new();
/// let entry = OutboxEntry::new("payments", "order-17", &json!({ "cents": 4200 }))?
///     .caused_by(command)
///     .header("content-type", "application/json");
/// assert_eq!(entry.command_id, command);
/// # Ok::<(), diesel_outbox::StoreError>(())
/// ```
///
/// `Debug` shows neither payload, keys nor headers.
#[derive(Clone, PartialEq)]
#[non_exhaustive]
pub struct OutboxEntry {
    /// Identity of the row.
    pub outbox_id: OutboxId,
    /// The command that produced it; the row's own id when none was given.
    pub command_id: CommandId,
    /// Label of the remote system, 1 to 255 bytes.
    pub destination: String,
    /// What to send.
    pub payload: Value,
    /// Forwarded to the remote with every attempt; unique within the
    /// destination. 1 to 1,024 bytes.
    pub idempotency_key: String,
    /// `Pending` in an entry to be enqueued; anything else is refused.
    pub status: OutboxStatus,
    /// Attempts so far, the current one included.
    pub attempt_count: u32,
    /// Not before this instant; `None` means due at once.
    pub next_attempt_at: Option<DateTime<Utc>>,
    /// When the service made it, by the service's clock, in microseconds.
    pub created_at: DateTime<Utc>,
    /// When it became `completed` or `failed`.
    pub completed_at: Option<DateTime<Utc>>,
    /// What travels beside the payload, such as trace context.
    pub headers: Option<Map<String, Value>>,
    /// Rows of one destination and key are begun one after another, oldest
    /// first; `None` is in no order. 1 to 255 bytes.
    pub ordering_key: Option<String>,
}

impl OutboxEntry {
    /// A pending entry, due at once, for `destination`.
    ///
    /// `idempotency_key` names the effect: choose it from the business event
    /// (`"order-17-charge"`), so that enqueuing the same effect twice is refused
    /// and the remote can recognise a repeated request. Lengths are checked when
    /// the entry is enqueued.
    ///
    /// # Errors
    /// [`StoreError::Serialization`] when `payload` cannot be written as JSON.
    pub fn new(
        destination: impl Into<String>,
        idempotency_key: impl Into<String>,
        payload: &impl Serialize,
    ) -> Result<Self, StoreError> {
        let outbox_id = OutboxId::new();
        Ok(Self {
            outbox_id,
            command_id: CommandId(outbox_id.0),
            destination: destination.into(),
            payload: serde_json::to_value(payload)
                .map_err(|_| StoreError::unencodable("payload"))?,
            idempotency_key: idempotency_key.into(),
            status: OutboxStatus::Pending,
            attempt_count: 0,
            next_attempt_at: None,
            created_at: cut(Utc::now()),
            completed_at: None,
            headers: None,
            ordering_key: None,
        })
    }

    /// Links the row to the command that produced it.
    #[must_use]
    pub fn caused_by(mut self, command: CommandId) -> Self {
        self.command_id = command;
        self
    }

    /// Keeps the row from being sent before `instant`, by the server's clock.
    #[must_use]
    pub fn not_before(mut self, instant: DateTime<Utc>) -> Self {
        self.next_attempt_at = Some(cut(instant));
        self
    }

    /// Adds a header; one of the same name is replaced.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers
            .get_or_insert_default()
            .insert(name.into(), Value::String(value.into()));
        self
    }

    /// Puts the row behind the others of its destination and this key: none of
    /// them is begun while an earlier one is pending, dispatching or unknown.
    ///
    /// Earlier means (`created_at`, id) among the rows that are committed when
    /// one is claimed; transactions that overlap have no promised order. A
    /// failed row lets the later ones pass unless its destination says
    /// [`KeyPolicy::Halt`](crate::KeyPolicy::Halt). One key is worked off by one
    /// call at a time, so choose what must be in order (an order, an account)
    /// and no more.
    #[must_use]
    pub fn ordering_key(mut self, key: impl Into<String>) -> Self {
        self.ordering_key = Some(key.into());
        self
    }

    /// Gives the row an identity of the caller's, for one that is derived.
    /// The command id is left alone.
    #[must_use]
    pub fn with_id(mut self, outbox_id: OutboxId) -> Self {
        self.outbox_id = outbox_id;
        self
    }

    /// Replaces the creation time (default: now, by this host's clock).
    /// It orders the rows of [`list_for_command`](crate::list_for_command) and
    /// of [`claim_due`](crate::claim_due); no clock is ever compared with it.
    #[must_use]
    pub fn with_created_at(mut self, instant: DateTime<Utc>) -> Self {
        self.created_at = cut(instant);
        self
    }
}

/// Cuts to the microseconds that the column holds, so that what is read back
/// compares equal.
pub(crate) fn cut(instant: DateTime<Utc>) -> DateTime<Utc> {
    instant.trunc_subsecs(6)
}

impl fmt::Debug for OutboxEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutboxEntry")
            .field("outbox_id", &self.outbox_id)
            .field("command_id", &self.command_id)
            .field("status", &self.status)
            .field("attempt_count", &self.attempt_count)
            .field("next_attempt_at", &self.next_attempt_at)
            .field("created_at", &self.created_at)
            .field("completed_at", &self.completed_at)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn debug_shows_neither_payload_nor_keys_nor_destination_nor_header() {
        let entry = OutboxEntry::new("CANARY-d", "CANARY-k", &json!("CANARY-p"))
            .unwrap()
            .header("CANARY-h", "CANARY-v")
            .ordering_key("CANARY-o");
        assert!(!format!("{entry:?}").contains("CANARY"));
    }

    #[test]
    fn instants_are_cut_not_rounded() {
        let at = "2026-01-01T00:00:59.999999999Z".parse().unwrap();
        let entry = OutboxEntry::new("a", "k", &()).unwrap().not_before(at);
        assert_eq!(
            entry.next_attempt_at.unwrap().to_rfc3339(),
            "2026-01-01T00:00:59.999999+00:00"
        );
    }

    #[test]
    fn the_command_is_the_row_itself_when_none_is_given() {
        let entry = OutboxEntry::new("a", "k", &()).unwrap();
        assert_eq!(entry.command_id.0, entry.outbox_id.0);
    }
}
