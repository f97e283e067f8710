//! pending → dispatching.

use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::dsl::{array, case_when};
use diesel::pg::PgConnection;
use diesel::prelude::*;

use super::check;
use super::decode::{ENTRY, EntryRow, StatusText};
use super::expression::{
    Beginning, Pending, after, instant_or, later_of, nextval, statement_timestamp,
};
use super::fault::{OrStoreError, Phase};
use crate::claim::{Claim, Claimed, Fence};
use crate::entry::{OutboxEntry, cut};
use crate::error::{StoreError, code};
use crate::schema::tf_outbox;
use crate::status::OutboxStatus;

diesel::alias!(tf_outbox as due: Due);

/// The sequence that numbers claims.
const CLAIM_SEQ: &str = "tf_outbox_claim_seq";

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
        .limit(i64::try_from(limit).unwrap_or(i64::MAX))
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

/// The dispatcher's claim: rows of one destination, in the order in which they
/// came due by the server's clock, each with a fence.
///
/// Spent rows and rows at the end of the counter are claimed like any other and
/// failed here: to look for them apart would mean walking the whole backlog.
pub(crate) fn claim(conn: &mut PgConnection, claim: &Claim<'_>) -> Result<Claimed, StoreError> {
    let phase = Phase::of_write(conn);
    let due_at = later_of(
        due.field(tf_outbox::enqueued_at),
        due.field(tf_outbox::next_attempt_at),
    );
    let first_due = due
        .filter(due.field(tf_outbox::destination).eq(claim.destination))
        .filter(due.field(tf_outbox::status).eq(Pending))
        .filter(due_at.le(statement_timestamp()))
        .order((due_at, due.field(tf_outbox::outbox_id)))
        .limit(i64::try_from(claim.limit).unwrap_or(i64::MAX))
        .select(due.field(tf_outbox::outbox_id))
        .for_update()
        .skip_locked();
    let counted = case_when(
        tf_outbox::attempt_count.lt(i32::MAX),
        tf_outbox::attempt_count + 1,
    )
    .otherwise(tf_outbox::attempt_count);
    let rows =
        diesel::update(tf_outbox::table.filter(tf_outbox::outbox_id.eq_any(array(first_due))))
            .set((
                tf_outbox::status.eq(StatusText(OutboxStatus::Dispatching)),
                tf_outbox::attempt_count.eq(counted),
                tf_outbox::claim_worker_id.eq(claim.worker_id),
                tf_outbox::claim_taken_at.eq(statement_timestamp().nullable()),
                tf_outbox::claim_expires_at.eq(after(
                    statement_timestamp(),
                    check::interval(claim.lease),
                )
                .nullable()),
                tf_outbox::claim_seq.eq(nextval(CLAIM_SEQ).nullable()),
            ))
            .returning((
                ENTRY,
                tf_outbox::claim_seq.assume_not_null(),
                tf_outbox::enqueued_at,
            ))
            .load::<(EntryRow, i64, super::decode::Kept<DateTime<Utc>>)>(conn)
            .or_store_error(phase)?;

    let mut claimed = Claimed::default();
    let mut ordered = Vec::with_capacity(rows.len());
    let mut spent = Vec::new();
    let mut corrupt = Vec::new();
    for (row, seq, enqueued_at) in rows {
        let fence = Fence {
            outbox_id: row.outbox_id,
            seq,
            attempt: row.attempt_count,
        };
        let before = i64::from(row.attempt_count) - 1;
        match (row.decode(), enqueued_at.read("enqueued_at")) {
            (Ok(_), Ok(_)) if before >= i64::from(claim.max_attempts) => spent.push(fence),
            (Ok(entry), Ok(enqueued_at)) => {
                let due_at = entry
                    .next_attempt_at
                    .map_or(enqueued_at, |at| at.max(enqueued_at));
                ordered.push((due_at, fence, entry));
            }
            _ => corrupt.push(fence),
        }
    }
    claimed.corrupt = fail_unbegun(conn, &corrupt, code::CORRUPT_ROW, 0, phase)?;
    // Their last call was another's: this claim began none.
    claimed.exhausted = fail_unbegun(conn, &spent, code::ATTEMPTS_EXHAUSTED, 1, phase)?;
    ordered.sort_by_key(|(due_at, fence, _)| (*due_at, fence.outbox_id));
    claimed.rows = ordered
        .into_iter()
        .map(|(_, fence, entry)| (fence, entry))
        .collect();
    Ok(claimed)
}

/// When the next row of `destination` falls due that is not due yet.
pub(crate) fn next_due(
    conn: &mut PgConnection,
    destination: &str,
) -> Result<Option<Duration>, StoreError> {
    let due_at = later_of(tf_outbox::enqueued_at, tf_outbox::next_attempt_at);
    let found = tf_outbox::table
        .filter(tf_outbox::destination.eq(destination))
        .filter(tf_outbox::status.eq(Pending))
        .filter(due_at.gt(statement_timestamp()))
        .order((due_at, tf_outbox::outbox_id))
        .select((due_at, statement_timestamp()))
        .first::<(
            super::decode::Kept<DateTime<Utc>>,
            super::decode::Kept<DateTime<Utc>>,
        )>(conn)
        .optional()
        .or_store_error(Phase::Read)?;
    Ok(found.and_then(|(due_at, now)| {
        let wait = due_at.read("next_attempt_at").ok()? - now.read("now").ok()?;
        wait.to_std().ok()
    }))
}

fn fail_unbegun(
    conn: &mut PgConnection,
    fences: &[Fence],
    reason: &str,
    uncounted: i32,
    phase: Phase,
) -> Result<usize, StoreError> {
    if fences.is_empty() {
        return Ok(0);
    }
    let (ids, seqs) = Fence::arrays(fences);
    diesel::update(
        tf_outbox::table
            .filter(tf_outbox::outbox_id.eq_any(ids))
            .filter(tf_outbox::claim_seq.eq_any(seqs)),
    )
    .set((
        failed_with(reason),
        tf_outbox::attempt_count.eq(tf_outbox::attempt_count - uncounted),
    ))
    .execute(conn)
    .or_store_error(phase)
}

type FailedWith<'a> = (
    diesel::dsl::Eq<tf_outbox::status, StatusText>,
    diesel::dsl::Eq<tf_outbox::completed_at, diesel::dsl::Nullable<statement_timestamp>>,
    diesel::dsl::Eq<tf_outbox::last_failure, &'a str>,
    diesel::dsl::Eq<tf_outbox::claim_worker_id, Option<String>>,
    diesel::dsl::Eq<tf_outbox::claim_taken_at, Option<DateTime<Utc>>>,
    diesel::dsl::Eq<tf_outbox::claim_expires_at, Option<DateTime<Utc>>>,
);

fn failed_with(reason: &str) -> FailedWith<'_> {
    (
        tf_outbox::status.eq(StatusText(OutboxStatus::Failed)),
        tf_outbox::completed_at.eq(statement_timestamp().nullable()),
        tf_outbox::last_failure.eq(reason),
        tf_outbox::claim_worker_id.eq(None),
        tf_outbox::claim_taken_at.eq(None),
        tf_outbox::claim_expires_at.eq(None),
    )
}
