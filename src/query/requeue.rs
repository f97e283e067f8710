//! Back to pending: retry, release, redrive.

use chrono::{DateTime, Utc};
use diesel::dsl::array;
use diesel::pg::PgConnection;
use diesel::prelude::*;

use super::decode::StatusText;
use super::expression::{Dispatching, first_of};
use super::fault::{OrStoreError, Phase};
use super::read::accept_if;
use super::session::notify;
use super::settle::{claim_cleared, hidden_status};
use crate::check;
use crate::entry::cut;
use crate::error::StoreError;
use crate::id::OutboxId;
use crate::schema::tf_outbox;
use crate::status::OutboxStatus;

diesel::alias!(tf_outbox as held: Held);

/// Puts a row back, not to be sent before `at`: from `pending` (only the time
/// moves), `dispatching` and `outcome_unknown`. The last failure is kept.
///
/// For a row whose outcome is unknown this is a decision to send again: make it
/// only when the remote is certain never to have had the request, or honours
/// the idempotency key.
///
/// # Errors
/// * [`StoreError::Serialization`]: an instant outside of what the column
///   holds. No SQL was sent.
/// * [`StoreError::NotFound`]: there is no such row.
/// * [`StoreError::Conflict`]: it is `completed` or `failed`. Nothing was
///   written.
/// * [`StoreError::Unavailable`], [`StoreError::Timeout`]: see [`StoreError`].
pub fn reschedule(
    conn: &mut PgConnection,
    outbox_id: OutboxId,
    at: DateTime<Utc>,
) -> Result<(), StoreError> {
    requeue(conn, outbox_id, None, at)
}

/// See [`reschedule`]; with a reason it is an answer, and the row is no suspect
/// any more.
pub(crate) fn requeue(
    conn: &mut PgConnection,
    outbox_id: OutboxId,
    reason: Option<&str>,
    at: DateTime<Utc>,
) -> Result<(), StoreError> {
    check::instant("next_attempt_at", at)?;
    let phase = Phase::of_write(conn);
    let open = [
        StatusText(OutboxStatus::Pending),
        StatusText(OutboxStatus::Dispatching),
        StatusText(OutboxStatus::OutcomeUnknown),
    ];
    let lapses = diesel::dsl::case_when(
        reason.is_some().into_sql::<diesel::sql_types::Bool>(),
        0.into_sql::<diesel::sql_types::Integer>(),
    )
    .otherwise(tf_outbox::lapse_count);
    let written = diesel::update(
        tf_outbox::table
            .find(outbox_id.0)
            .filter(hidden_status().eq_any(open)),
    )
    .set((
        tf_outbox::status.eq(StatusText(OutboxStatus::Pending)),
        tf_outbox::next_attempt_at.eq(cut(at)),
        tf_outbox::last_failure.eq(first_of(
            reason.into_sql::<diesel::sql_types::Nullable<diesel::sql_types::Text>>(),
            tf_outbox::last_failure,
        )),
        tf_outbox::lapse_count.eq(lapses),
        tf_outbox::claim_seq.eq(None::<i64>),
        tf_outbox::unknown_since.eq(None::<DateTime<Utc>>),
        claim_cleared(),
    ))
    .execute(conn)
    .or_store_error(phase)?;
    match written {
        1 => Ok(()),
        _ => accept_if(conn, outbox_id, None),
    }
}

/// Puts back, due at once, every row whose claim was taken strictly before
/// `claimed_before` or at no known time. Returns their ids, sorted.
///
/// **Only for callers who know that nothing was sent.** A
/// [`Dispatcher`](crate::Dispatcher) never releases: to it a claim without an
/// answer is an unknown outcome. Rows that another transaction holds are passed
/// over.
///
/// # Errors
/// * [`StoreError::Serialization`]: an instant outside of what the column
///   holds. No SQL was sent.
/// * [`StoreError::Unavailable`], [`StoreError::Timeout`],
///   [`StoreError::Conflict`]: see [`StoreError`].
pub fn release_expired_claims(
    conn: &mut PgConnection,
    claimed_before: DateTime<Utc>,
) -> Result<Vec<OutboxId>, StoreError> {
    check::instant("claimed_before", claimed_before)?;
    let phase = Phase::of_write(conn);
    let expired = held
        .filter(held.field(tf_outbox::status).eq(Dispatching))
        .filter(
            held.field(tf_outbox::claim_taken_at).is_null().or(held
                .field(tf_outbox::claim_taken_at)
                .lt(cut(claimed_before))),
        )
        .select(held.field(tf_outbox::outbox_id))
        .for_update()
        .skip_locked();
    let mut released =
        diesel::update(tf_outbox::table.filter(tf_outbox::outbox_id.eq_any(array(expired))))
            .set((
                tf_outbox::status.eq(StatusText(OutboxStatus::Pending)),
                tf_outbox::next_attempt_at.eq(None::<DateTime<Utc>>),
                tf_outbox::claim_seq.eq(None::<i64>),
                claim_cleared(),
            ))
            .returning(tf_outbox::outbox_id)
            .load::<uuid::Uuid>(conn)
            .or_store_error(phase)?;
    if !released.is_empty() {
        notify(conn, phase)?;
    }
    released.sort_unstable();
    Ok(released.into_iter().map(OutboxId).collect())
}

/// An operator's decision to send a failed row again, with all its attempts:
/// `failed` → `pending`, due at once. Nothing else leaves a terminal state.
///
/// # Errors
/// * [`StoreError::NotFound`]: there is no such row.
/// * [`StoreError::Conflict`]: it is not `failed`. Nothing was written.
/// * [`StoreError::Unavailable`], [`StoreError::Timeout`]: see [`StoreError`].
pub fn redrive(conn: &mut PgConnection, outbox_id: OutboxId) -> Result<(), StoreError> {
    let phase = Phase::of_write(conn);
    let written = diesel::update(
        tf_outbox::table
            .find(outbox_id.0)
            .filter(hidden_status().eq(StatusText(OutboxStatus::Failed))),
    )
    .set((
        tf_outbox::status.eq(StatusText(OutboxStatus::Pending)),
        tf_outbox::attempt_count.eq(0),
        tf_outbox::next_attempt_at.eq(None::<DateTime<Utc>>),
        tf_outbox::completed_at.eq(None::<DateTime<Utc>>),
        tf_outbox::lapse_count.eq(0),
        tf_outbox::halts_key.eq(false),
        tf_outbox::unknown_since.eq(None::<DateTime<Utc>>),
        tf_outbox::claim_seq.eq(None::<i64>),
        claim_cleared(),
    ))
    .execute(conn)
    .or_store_error(phase)?;
    match written {
        1 => notify(conn, phase),
        _ => accept_if(conn, outbox_id, None),
    }
}

/// An operator's decision to let the later rows of its ordering key pass a failed
/// row that holds them back ([`KeyPolicy::Halt`](crate::KeyPolicy::Halt)). The row
/// stays failed. Repeated on a failed row that holds nobody back it changes
/// nothing.
///
/// # Errors
/// * [`StoreError::NotFound`]: there is no such row.
/// * [`StoreError::Conflict`]: it is not `failed`. Nothing was written.
/// * [`StoreError::Unavailable`], [`StoreError::Timeout`]: see [`StoreError`].
pub fn skip_failed(conn: &mut PgConnection, outbox_id: OutboxId) -> Result<(), StoreError> {
    let phase = Phase::of_write(conn);
    let written = diesel::update(
        tf_outbox::table
            .find(outbox_id.0)
            .filter(hidden_status().eq(StatusText(OutboxStatus::Failed)))
            .filter(tf_outbox::halts_key),
    )
    .set(tf_outbox::halts_key.eq(false))
    .execute(conn)
    .or_store_error(phase)?;
    match written {
        1 => notify(conn, phase),
        _ => accept_if(conn, outbox_id, Some(OutboxStatus::Failed)),
    }
}
