//! The store behind the async traits of `turnframe-store` 0.2.
//!
//! For applications that are built on those traits and want this crate's store
//! under them: the blocking work runs on the `blocking` crate's thread pool,
//! whatever the async runtime.

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use turnframe_core::command::IdempotencyKey;
use turnframe_core::error::StoreError as TheirError;
use turnframe_core::event::{OutboxEntry as TheirEntry, OutboxStatus as TheirStatus};
use turnframe_core::ids::{CommandId as TheirCommandId, OutboxId as TheirId};
use turnframe_store::outbox::{
    OutboxClaim as TheirClaim, OutboxReader as TheirReader, OutboxRecord as TheirRecord,
    OutboxWriter as TheirWriter,
};

use crate::entry::{OutboxEntry, cut};
use crate::error::StoreError;
#[cfg(test)]
use crate::error::code;
use crate::id::{CommandId, OutboxId};
use crate::record::OutboxRecord;
use crate::status::OutboxStatus;
use crate::store::{OutboxReader, OutboxWriter, PgOutbox};

/// A [`PgOutbox`] that implements the outbox traits of `turnframe-store`.
///
/// Cloning shares the pool.
#[derive(Debug, Clone)]
pub struct TurnframeOutbox(PgOutbox);

impl TurnframeOutbox {
    /// Wraps a store.
    #[must_use]
    pub const fn new(outbox: PgOutbox) -> Self {
        Self(outbox)
    }

    /// Runs `operation` on a thread that may block.
    async fn run<T: Send + 'static>(
        &self,
        operation: impl FnOnce(&PgOutbox) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, TheirError> {
        let outbox = self.0.clone();
        blocking::unblock(move || operation(&outbox))
            .await
            .map_err(their_error)
    }
}

#[async_trait]
impl TheirReader for TurnframeOutbox {
    async fn get(&self, outbox_id: &TheirId) -> Result<TheirRecord, TheirError> {
        let id = our_id(outbox_id);
        self.run(move |outbox| outbox.get(id))
            .await
            .map(their_record)
    }

    async fn list_for_command(
        &self,
        command_id: &TheirCommandId,
    ) -> Result<Vec<TheirRecord>, TheirError> {
        let id = CommandId(*command_id.as_uuid());
        let records = self.run(move |outbox| outbox.list_for_command(id)).await?;
        Ok(records.into_iter().map(their_record).collect())
    }
}

#[async_trait]
impl TheirWriter for TurnframeOutbox {
    async fn enqueue(&self, entry: TheirEntry) -> Result<(), TheirError> {
        let entry = our_entry(entry).map_err(their_error)?;
        self.run(move |outbox| outbox.enqueue(&entry)).await
    }

    async fn claim_due(
        &self,
        now: DateTime<Utc>,
        limit: usize,
        worker_id: &str,
    ) -> Result<Vec<TheirEntry>, TheirError> {
        let worker_id = worker_id.to_owned();
        let claimed = self
            .run(move |outbox| outbox.claim_due(now, limit, &worker_id))
            .await?;
        Ok(claimed.into_iter().map(their_entry).collect())
    }

    async fn mark_completed(&self, outbox_id: &TheirId) -> Result<(), TheirError> {
        let id = our_id(outbox_id);
        self.run(move |outbox| outbox.mark_completed(id)).await
    }

    async fn mark_failed(
        &self,
        outbox_id: &TheirId,
        reason: String,
        retry_at: Option<DateTime<Utc>>,
    ) -> Result<(), TheirError> {
        let id = our_id(outbox_id);
        self.run(move |outbox| outbox.mark_failed(id, &reason, retry_at))
            .await
    }

    async fn mark_outcome_unknown(
        &self,
        outbox_id: &TheirId,
        remote_ref: Option<String>,
    ) -> Result<(), TheirError> {
        let id = our_id(outbox_id);
        self.run(move |outbox| outbox.mark_outcome_unknown(id, remote_ref.as_deref()))
            .await
    }

    async fn reschedule(
        &self,
        outbox_id: &TheirId,
        next_attempt_at: DateTime<Utc>,
    ) -> Result<(), TheirError> {
        let id = our_id(outbox_id);
        self.run(move |outbox| outbox.reschedule(id, next_attempt_at))
            .await
    }

    async fn release_expired_claims(
        &self,
        claimed_before: DateTime<Utc>,
    ) -> Result<Vec<TheirId>, TheirError> {
        let released = self
            .run(move |outbox| outbox.release_expired_claims(claimed_before))
            .await?;
        Ok(released.into_iter().map(|id| TheirId::from(id.0)).collect())
    }
}

fn our_id(id: &TheirId) -> OutboxId {
    OutboxId(*id.as_uuid())
}

fn our_entry(entry: TheirEntry) -> Result<OutboxEntry, StoreError> {
    Ok(OutboxEntry {
        outbox_id: our_id(&entry.outbox_id),
        command_id: CommandId(*entry.command_id.as_uuid()),
        destination: entry.destination,
        payload: entry.payload,
        idempotency_key: entry.idempotency_key.as_str().to_owned(),
        status: our_status(entry.status)?,
        attempt_count: entry.attempt_count,
        next_attempt_at: entry.next_attempt_at.map(cut),
        created_at: cut(entry.created_at),
        completed_at: entry.completed_at.map(cut),
        headers: None,
        ordering_key: None,
    })
}

/// Their enum may grow; what it grew by is not a status of ours.
fn our_status(status: TheirStatus) -> Result<OutboxStatus, StoreError> {
    match status {
        TheirStatus::Pending => Ok(OutboxStatus::Pending),
        TheirStatus::Dispatching => Ok(OutboxStatus::Dispatching),
        TheirStatus::OutcomeUnknown => Ok(OutboxStatus::OutcomeUnknown),
        TheirStatus::Completed => Ok(OutboxStatus::Completed),
        TheirStatus::Failed => Ok(OutboxStatus::Failed),
        _ => Err(StoreError::invalid("status")),
    }
}

fn their_entry(entry: OutboxEntry) -> TheirEntry {
    TheirEntry {
        outbox_id: TheirId::from(entry.outbox_id.0),
        command_id: TheirCommandId::from(entry.command_id.0),
        destination: entry.destination,
        payload: entry.payload,
        idempotency_key: IdempotencyKey::new(entry.idempotency_key),
        status: match entry.status {
            OutboxStatus::Pending => TheirStatus::Pending,
            OutboxStatus::Dispatching => TheirStatus::Dispatching,
            OutboxStatus::OutcomeUnknown => TheirStatus::OutcomeUnknown,
            OutboxStatus::Completed => TheirStatus::Completed,
            OutboxStatus::Failed => TheirStatus::Failed,
        },
        attempt_count: entry.attempt_count,
        next_attempt_at: entry.next_attempt_at,
        created_at: entry.created_at,
        completed_at: entry.completed_at,
    }
}

fn their_record(record: OutboxRecord) -> TheirRecord {
    TheirRecord {
        entry: their_entry(record.entry),
        claim: record.claim.map(|claim| TheirClaim {
            worker_id: claim.worker_id,
            claimed_at: claim.claimed_at,
        }),
        last_failure: record.last_failure,
        remote_ref: record.remote_ref,
    }
}

fn their_error(error: StoreError) -> TheirError {
    match error {
        StoreError::NotFound => TheirError::NotFound,
        StoreError::Conflict => TheirError::Conflict,
        StoreError::Unavailable => TheirError::Unavailable,
        StoreError::Timeout => TheirError::Timeout,
        StoreError::Serialization { .. } => TheirError::Serialization,
        StoreError::Corrupt { .. } => TheirError::Corrupt,
        StoreError::Other { code, .. } => TheirError::Other {
            code: code.to_owned(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_keeps_the_code_that_upstream_knows() {
        assert_eq!(
            their_error(StoreError::invalid("status")),
            TheirError::Other {
                code: code::INVALID_RECORD.to_owned()
            }
        );
        assert_eq!(
            code::INVALID_RECORD,
            turnframe_store::error::codes::INVALID_RECORD
        );
    }
}
