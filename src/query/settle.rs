//! dispatching or outcome_unknown → completed, failed; dispatching →
//! outcome_unknown. By id, for callers who settle rows themselves.

use chrono::{DateTime, Utc};
use diesel::pg::PgConnection;
use diesel::prelude::*;

use super::decode::StatusText;
use super::expression::{first_of, statement_timestamp};
use super::fault::{OrStoreError, Phase};
use super::read::accept_if;
use super::requeue::requeue;
use crate::check;
use crate::error::StoreError;
use crate::id::OutboxId;
use crate::schema::tf_outbox;
use crate::status::OutboxStatus;

/// `status`, out of the planner's sight: the row is addressed by its id, and
/// with statistics from an emptier queue a plain comparison makes the planner
/// take a partial index over the primary key.
pub(crate) fn hidden_status() -> HiddenStatus {
    tf_outbox::status.concat("")
}

pub(crate) type HiddenStatus = diesel::dsl::Concat<tf_outbox::status, &'static str>;

/// What may become `completed` or `failed`.
fn in_flight() -> [StatusText; 2] {
    [
        StatusText(OutboxStatus::Dispatching),
        StatusText(OutboxStatus::OutcomeUnknown),
    ]
}

type ClaimCleared = (
    diesel::dsl::Eq<tf_outbox::claim_worker_id, Option<String>>,
    diesel::dsl::Eq<tf_outbox::claim_taken_at, Option<DateTime<Utc>>>,
    diesel::dsl::Eq<tf_outbox::claim_expires_at, Option<DateTime<Utc>>>,
);

/// The claim is over; `claim_seq` stays, so that its holder can tell that it
/// was the one who settled.
pub(crate) fn claim_cleared() -> ClaimCleared {
    (
        tf_outbox::claim_worker_id.eq(None),
        tf_outbox::claim_taken_at.eq(None),
        tf_outbox::claim_expires_at.eq(None),
    )
}

/// The remote confirmed: `dispatching` or `outcome_unknown` → `completed`.
/// Repeated on a row that is already completed it changes nothing.
///
/// # Errors
/// * [`StoreError::NotFound`]: there is no such row.
/// * [`StoreError::Conflict`]: the row is `pending` or `failed`. Nothing was
///   written.
/// * [`StoreError::Unavailable`], [`StoreError::Timeout`]: see [`StoreError`].
pub fn mark_completed(conn: &mut PgConnection, outbox_id: OutboxId) -> Result<(), StoreError> {
    let phase = Phase::of_write(conn);
    let written = diesel::update(
        tf_outbox::table
            .find(outbox_id.0)
            .filter(hidden_status().eq_any(in_flight())),
    )
    .set((
        tf_outbox::status.eq(StatusText(OutboxStatus::Completed)),
        tf_outbox::completed_at.eq(statement_timestamp().nullable()),
        tf_outbox::lapse_count.eq(0),
        claim_cleared(),
    ))
    .execute(conn)
    .or_store_error(phase)?;
    match written {
        1 => Ok(()),
        _ => accept_if(conn, outbox_id, Some(OutboxStatus::Completed)),
    }
}

/// Records a failure under `reason`, a stable code and never free text.
///
/// With `retry_at` the row goes back to `pending`, not to be sent before that
/// instant: from `pending` (only the time moves), `dispatching` and
/// `outcome_unknown`. Without it the row becomes `failed`, from `dispatching`
/// and `outcome_unknown`; repeated on a failed row the reason becomes the new
/// one and `completed_at` stays the first.
///
/// # Errors
/// * [`StoreError::Serialization`]: a NUL in `reason`, or an instant outside of
///   what the column holds. No SQL was sent.
/// * [`StoreError::NotFound`]: there is no such row.
/// * [`StoreError::Conflict`]: the row is in another state. Nothing was written.
/// * [`StoreError::Unavailable`], [`StoreError::Timeout`]: see [`StoreError`].
pub fn mark_failed(
    conn: &mut PgConnection,
    outbox_id: OutboxId,
    reason: &str,
    retry_at: Option<DateTime<Utc>>,
) -> Result<(), StoreError> {
    check::text("reason", reason)?;
    match retry_at {
        Some(retry_at) => requeue(conn, outbox_id, Some(reason), retry_at),
        None => fail(conn, outbox_id, reason),
    }
}

fn fail(conn: &mut PgConnection, outbox_id: OutboxId, reason: &str) -> Result<(), StoreError> {
    let phase = Phase::of_write(conn);
    let written = diesel::update(
        tf_outbox::table
            .find(outbox_id.0)
            .filter(hidden_status().eq_any(in_flight())),
    )
    .set((
        tf_outbox::status.eq(StatusText(OutboxStatus::Failed)),
        tf_outbox::completed_at.eq(statement_timestamp().nullable()),
        tf_outbox::last_failure.eq(reason),
        tf_outbox::lapse_count.eq(0),
        claim_cleared(),
    ))
    .execute(conn)
    .or_store_error(phase)?;
    if written == 1 {
        return Ok(());
    }
    let repeated = diesel::update(
        tf_outbox::table
            .find(outbox_id.0)
            .filter(hidden_status().eq(StatusText(OutboxStatus::Failed))),
    )
    .set(tf_outbox::last_failure.eq(reason))
    .execute(conn)
    .or_store_error(phase)?;
    match repeated {
        1 => Ok(()),
        _ => accept_if(conn, outbox_id, None),
    }
}

/// The call was made and nobody knows how it ended: `dispatching` →
/// `outcome_unknown`, with the remote's own reference where it gave one.
///
/// Repeated on a row whose outcome is already unknown it fills in `remote_ref`
/// where there was none and changes nothing else: reconciliation may learn the
/// reference later.
///
/// # Errors
/// * [`StoreError::Serialization`]: a NUL in `remote_ref`. No SQL was sent.
/// * [`StoreError::NotFound`]: there is no such row.
/// * [`StoreError::Conflict`]: the row is in another state. Nothing was written.
/// * [`StoreError::Unavailable`], [`StoreError::Timeout`]: see [`StoreError`].
pub fn mark_outcome_unknown(
    conn: &mut PgConnection,
    outbox_id: OutboxId,
    remote_ref: Option<&str>,
) -> Result<(), StoreError> {
    remote_ref.map_or(Ok(()), |text| check::text("remote_ref", text))?;
    let phase = Phase::of_write(conn);
    let written = diesel::update(
        tf_outbox::table
            .find(outbox_id.0)
            .filter(hidden_status().eq(StatusText(OutboxStatus::Dispatching))),
    )
    .set((
        tf_outbox::status.eq(StatusText(OutboxStatus::OutcomeUnknown)),
        tf_outbox::remote_ref.eq(remote_ref),
        tf_outbox::unknown_since.eq(statement_timestamp().nullable()),
        tf_outbox::lapse_count.eq(0),
        claim_cleared(),
    ))
    .execute(conn)
    .or_store_error(phase)?;
    if written == 1 {
        return Ok(());
    }
    let repeated = diesel::update(
        tf_outbox::table
            .find(outbox_id.0)
            .filter(hidden_status().eq(StatusText(OutboxStatus::OutcomeUnknown))),
    )
    .set(tf_outbox::remote_ref.eq(first_of(tf_outbox::remote_ref, remote_ref)))
    .execute(conn)
    .or_store_error(phase)?;
    match repeated {
        1 => Ok(()),
        _ => accept_if(conn, outbox_id, None),
    }
}
