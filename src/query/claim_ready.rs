//! pending → dispatching, for the dispatcher: rows without an ordering key, in the
//! order in which they came due by the server's clock, each with a fence.

use chrono::{DateTime, Utc};
use diesel::pg::PgConnection;
use diesel::prelude::*;

use super::bind;
use super::claim::failed_with;
use super::decode::{EntryRow, Kept};
use super::expression::{Pending, later_of, statement_timestamp};
use super::fault::{OrStoreError, Phase};
use crate::claim::{Claim, Claimed, Fence, KeyPolicy};
use crate::error::{StoreError, code};
use crate::schema::tf_outbox;

diesel::alias!(tf_outbox as due: Due);

/// The sequence that numbers claims.
pub(crate) const CLAIM_SEQ: &str = "tf_outbox_claim_seq";

/// pending → dispatching for the ids of a locking subselect, which has judged
/// the status: the UPDATE addresses rows by id and needs none. `ARRAY(…)` is
/// computed once; as a plain IN (…) the planner may run it again and claim more
/// than the limit.
macro_rules! take {
    ($claim:expr, $chosen:expr) => {{
        // The public claim passes over a row at the end of the counter; to look
        // for those apart would mean walking the backlog, so they are claimed
        // like any other, and failed as spent.
        let counted = diesel::dsl::case_when(
            tf_outbox::attempt_count.lt(i32::MAX),
            tf_outbox::attempt_count + 1,
        )
        .otherwise(tf_outbox::attempt_count);
        diesel::update(
            tf_outbox::table.filter(tf_outbox::outbox_id.eq_any(diesel::dsl::array($chosen))),
        )
        .set((
            tf_outbox::status.eq($crate::query::decode::StatusText(
                $crate::status::OutboxStatus::Dispatching,
            )),
            tf_outbox::attempt_count.eq(counted),
            tf_outbox::claim_worker_id.eq($claim.worker_id.as_str()),
            tf_outbox::claim_taken_at
                .eq($crate::query::expression::statement_timestamp().nullable()),
            tf_outbox::claim_expires_at.eq($crate::query::expression::after(
                $crate::query::expression::statement_timestamp(),
                $crate::query::bind::interval($claim.lease),
            )
            .nullable()),
            tf_outbox::claim_seq.eq($crate::query::expression::nextval(
                $crate::query::claim_ready::CLAIM_SEQ,
            )
            .nullable()),
        ))
        .returning((
            $crate::query::decode::ENTRY,
            tf_outbox::claim_seq.assume_not_null(),
            tf_outbox::enqueued_at,
        ))
    }};
}
pub(crate) use take;

/// What [`take`] returns: the row, its `claim_seq`, and when it was inserted.
pub(crate) type Taken = (EntryRow, i64, Kept<DateTime<Utc>>);

/// Claims the rows of one destination that came due first.
pub(crate) fn claim_ready(conn: &mut PgConnection, claim: &Claim) -> Result<Claimed, StoreError> {
    let due_at = later_of(
        due.field(tf_outbox::enqueued_at),
        due.field(tf_outbox::next_attempt_at),
    );
    let first_due = due
        .filter(
            due.field(tf_outbox::destination)
                .eq(claim.destination.as_str()),
        )
        .filter(due.field(tf_outbox::status).eq(Pending))
        .filter(due.field(tf_outbox::ordering_key).is_null())
        .filter(due_at.le(statement_timestamp()))
        .order((due_at, due.field(tf_outbox::outbox_id)))
        .limit(bind::limit(claim.limit))
        .select(due.field(tf_outbox::outbox_id))
        .for_update()
        .skip_locked();
    let taken = take!(claim, first_due)
        .load::<Taken>(conn)
        .or_store_error(Phase::Statement)?;
    hand_out(conn, claim, taken)
}

/// Sorts claimed rows by when they came due, and fails those that are not to be
/// sent: what cannot be decoded, and what has no attempts left.
pub(crate) fn hand_out(
    conn: &mut PgConnection,
    claim: &Claim,
    taken: Vec<Taken>,
) -> Result<Claimed, StoreError> {
    let mut claimed = Claimed::default();
    let mut ordered = Vec::with_capacity(taken.len());
    let mut spent = Vec::new();
    let mut corrupt = Vec::new();
    for (row, seq, enqueued_at) in taken {
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
    claimed.corrupt = fail_unbegun(conn, &corrupt, code::CORRUPT_ROW, 0, claim.on_failure)?;
    // Their last call was another's: this claim began none.
    claimed.exhausted = fail_unbegun(conn, &spent, code::ATTEMPTS_EXHAUSTED, 1, claim.on_failure)?;
    ordered.sort_by_key(|(due_at, fence, _)| (*due_at, fence.outbox_id));
    claimed.rows = ordered
        .into_iter()
        .map(|(_, fence, entry)| (fence, entry))
        .collect();
    Ok(claimed)
}

fn fail_unbegun(
    conn: &mut PgConnection,
    fences: &[Fence],
    reason: &str,
    uncounted: i32,
    on_failure: KeyPolicy,
) -> Result<usize, StoreError> {
    if fences.is_empty() {
        return Ok(0);
    }
    let (ids, seqs) = Fence::arrays(fences);
    let halts = (on_failure == KeyPolicy::Halt).into_sql::<diesel::sql_types::Bool>();
    diesel::update(
        tf_outbox::table
            .filter(tf_outbox::outbox_id.eq_any(ids))
            .filter(tf_outbox::claim_seq.eq_any(seqs)),
    )
    .set((
        failed_with(reason),
        tf_outbox::halts_key.eq(tf_outbox::ordering_key.is_not_null().and(halts)),
        tf_outbox::attempt_count.eq(tf_outbox::attempt_count - uncounted),
    ))
    .execute(conn)
    .or_store_error(Phase::Statement)
}
