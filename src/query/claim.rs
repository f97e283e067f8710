//! pending → dispatching, for callers who settle rows themselves.

use chrono::{DateTime, Utc};
use diesel::dsl::array;
use diesel::pg::PgConnection;
use diesel::prelude::*;

use super::bind;
use super::decode::{ENTRY, EntryRow, StatusText};
use super::expression::{Beginning, Pending, instant_or, statement_timestamp};
use super::fault::{OrStoreError, Phase};
use crate::check;
use crate::entry::{OutboxEntry, cut};
use crate::error::{StoreError, code};
use crate::schema::tf_outbox;
use crate::status::OutboxStatus;

diesel::alias!(tf_outbox as due: Due);

/// Claims up to `limit` rows that are due at `at`, of any destination, for
/// `worker_id`: the oldest by (created_at, id) first.
///
/// This is for callers who settle rows themselves, by id. A
/// [`Dispatcher`](crate::Dispatcher) has a claim of its own, which it fences.
/// Rows that another transaction holds are passed over, not waited for. One
/// claimed row that cannot be decoded becomes `failed` with
/// [`code::CORRUPT_ROW`]; the others are returned. A claim that is
/// never settled lapses, for any dispatcher of its destination, once it is older
/// than that dispatcher's `foreign_lease`.
///
/// It knows no ordering keys: rows of one key may come in one batch, and beside
/// one that a dispatcher has in flight.
///
/// `limit` 0 returns nothing; one past `i64::MAX` saturates.
///
/// # Errors
/// * [`StoreError::Serialization`]: a NUL in `worker_id`, or an instant outside
///   of what the column holds. No SQL was sent.
/// * [`StoreError::Unavailable`], [`StoreError::Timeout`],
///   [`StoreError::Conflict`]: see [`StoreError`].
pub fn claim_due(
    conn: &mut PgConnection,
    at: DateTime<Utc>,
    limit: usize,
    worker_id: &str,
) -> Result<Vec<OutboxEntry>, StoreError> {
    check::text("worker_id", worker_id)?;
    check::instant("at", at)?;
    if limit == 0 {
        return Ok(Vec::new());
    }
    let at = cut(at);
    let phase = Phase::of_write(conn);
    // ARRAY(…) is computed once, before anything else. As a plain IN (…) the
    // planner may run the subselect again for each outer row, and claim more
    // than the limit.
    let oldest = due
        .filter(due.field(tf_outbox::status).eq(Pending))
        .filter(instant_or(due.field(tf_outbox::next_attempt_at), Beginning).le(at))
        .filter(due.field(tf_outbox::attempt_count).lt(i32::MAX))
        .order((
            due.field(tf_outbox::created_at),
            due.field(tf_outbox::outbox_id),
        ))
        .limit(bind::limit(limit))
        .select(due.field(tf_outbox::outbox_id))
        .for_update()
        .skip_locked();
    let rows = diesel::update(tf_outbox::table.filter(tf_outbox::outbox_id.eq_any(array(oldest))))
        .set((
            tf_outbox::status.eq(StatusText(OutboxStatus::Dispatching)),
            tf_outbox::attempt_count.eq(tf_outbox::attempt_count + 1),
            tf_outbox::claim_worker_id.eq(worker_id),
            tf_outbox::claim_taken_at.eq(at),
            tf_outbox::claim_expires_at.eq(None::<DateTime<Utc>>),
        ))
        .returning(ENTRY)
        .load::<EntryRow>(conn)
        .or_store_error(phase)?;

    let mut entries = Vec::with_capacity(rows.len());
    let mut corrupt = Vec::new();
    for row in rows {
        let id = row.outbox_id;
        match row.decode() {
            Ok(entry) => entries.push(entry),
            Err(_) => corrupt.push(id),
        }
    }
    if !corrupt.is_empty() {
        tracing::warn!(
            rows = corrupt.len(),
            "claimed rows that cannot be decoded are failed"
        );
        diesel::update(
            tf_outbox::table
                .filter(tf_outbox::outbox_id.eq_any(corrupt))
                .filter(tf_outbox::claim_worker_id.eq(worker_id)),
        )
        .set(failed_with(code::CORRUPT_ROW))
        .execute(conn)
        .or_store_error(phase)?;
    }
    // RETURNING has no order.
    entries.sort_by_key(|entry| (entry.created_at, entry.outbox_id));
    Ok(entries)
}

pub(crate) type FailedWith<'a> = (
    diesel::dsl::Eq<tf_outbox::status, StatusText>,
    diesel::dsl::Eq<tf_outbox::completed_at, diesel::dsl::Nullable<statement_timestamp>>,
    diesel::dsl::Eq<tf_outbox::last_failure, &'a str>,
    diesel::dsl::Eq<tf_outbox::claim_worker_id, Option<String>>,
    diesel::dsl::Eq<tf_outbox::claim_taken_at, Option<DateTime<Utc>>>,
    diesel::dsl::Eq<tf_outbox::claim_expires_at, Option<DateTime<Utc>>>,
);

/// The end of a claimed row that is not handed out.
pub(crate) fn failed_with(reason: &str) -> FailedWith<'_> {
    (
        tf_outbox::status.eq(StatusText(OutboxStatus::Failed)),
        tf_outbox::completed_at.eq(statement_timestamp().nullable()),
        tf_outbox::last_failure.eq(reason),
        tf_outbox::claim_worker_id.eq(None),
        tf_outbox::claim_taken_at.eq(None),
        tf_outbox::claim_expires_at.eq(None),
    )
}
