//! What is stored: an entry and what has happened to it.

use std::fmt;
use std::time::Duration;

use chrono::{DateTime, Utc};

use crate::entry::OutboxEntry;

/// Who holds a row in `dispatching`, and since when.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutboxClaim {
    /// The holder, as it named itself.
    pub worker_id: String,
    /// When the claim was taken or last renewed.
    pub claimed_at: DateTime<Utc>,
}

/// A stored row.
///
/// `Debug` shows no payload, key, destination, header or remote reference.
#[derive(Clone, PartialEq)]
#[non_exhaustive]
pub struct OutboxRecord {
    /// The row as it was enqueued, with its present status and attempts.
    pub entry: OutboxEntry,
    /// The claim, while `dispatching`.
    pub claim: Option<OutboxClaim>,
    /// Stable code of the last failure.
    pub last_failure: Option<String>,
    /// The remote's own reference, for reconciliation.
    pub remote_ref: Option<String>,
    /// When the row was inserted, by the server's clock.
    pub enqueued_at: DateTime<Utc>,
    /// When the outcome became unknown, by the server's clock.
    pub unknown_since: Option<DateTime<Utc>>,
    /// How long the outcome had been unknown when this was read, measured by
    /// the server's clock alone: the remote has had that long to apply a request
    /// that was given up.
    pub unknown_for: Option<Duration>,
    /// How often reconciliation has asked about the row, this time included.
    pub probe_count: u32,
    /// Claims that lapsed since the last answer.
    pub lapse_count: u32,
    /// On a failed row: the later rows of its ordering key wait until an operator
    /// acts, by [`redrive`](crate::redrive) or [`skip_failed`](crate::skip_failed).
    pub halts_key: bool,
}

impl fmt::Debug for OutboxRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutboxRecord")
            .field("entry", &self.entry)
            .field("claim", &self.claim)
            .field("last_failure", &self.last_failure)
            .field("unknown_since", &self.unknown_since)
            .field("probe_count", &self.probe_count)
            .field("lapse_count", &self.lapse_count)
            .field("halts_key", &self.halts_key)
            .finish_non_exhaustive()
    }
}
