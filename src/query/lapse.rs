//! dispatching → outcome_unknown, when a claim was not settled in time.

use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::dsl::array;
use diesel::pg::PgConnection;
use diesel::prelude::*;

use super::bind;
use super::decode::StatusText;
use super::expression::{Dispatching, OutcomeUnknown, after, before, statement_timestamp};
use super::fault::{OrStoreError, Phase};
use super::settle::claim_cleared;
use crate::claim::WORKER_PREFIX;
use crate::error::{StoreError, code};
use crate::schema::tf_outbox;
use crate::status::OutboxStatus;

diesel::alias!(tf_outbox as held: Held);

/// Lapses claims on rows of `destinations`: those of dispatchers whose lease is
/// over by the server's clock, and any other claim that is older than
/// `foreign_lease`, that far ahead of the clock, or of no known time. At most
/// `limit`, passing over locked rows; returns how many.
pub(crate) fn lapse(
    conn: &mut PgConnection,
    destinations: &[String],
    foreign_lease: Duration,
    limit: i64,
) -> Result<usize, StoreError> {
    let taken_at = held.field(tf_outbox::claim_taken_at);
    let expires_at = held.field(tf_outbox::claim_expires_at);
    let holder = held.field(tf_outbox::claim_worker_id);
    let ours = format!("{WORKER_PREFIX}%");
    let foreign = bind::interval(foreign_lease);
    // Each side on its own: `NOT (…)` of a comparison with a null holder is null.
    let over = holder
        .like(ours.clone())
        .and(expires_at.lt(statement_timestamp().nullable()))
        .or(holder
            .is_null()
            .or(holder.not_like(ours))
            .or(expires_at.is_null())
            .and(
                taken_at
                    .is_null()
                    .or(taken_at.lt(before(statement_timestamp(), foreign).nullable()))
                    .or(taken_at.gt(after(statement_timestamp(), foreign).nullable())),
            ));
    let lapsed = held
        .filter(held.field(tf_outbox::status).eq(Dispatching))
        .filter(held.field(tf_outbox::destination).eq_any(destinations))
        .filter(over)
        .order(taken_at)
        .limit(limit)
        .select(held.field(tf_outbox::outbox_id))
        .for_update()
        .skip_locked();
    diesel::update(tf_outbox::table.filter(tf_outbox::outbox_id.eq_any(array(lapsed))))
        .set((
            tf_outbox::status.eq(StatusText(OutboxStatus::OutcomeUnknown)),
            tf_outbox::last_failure.eq(code::LAPSED),
            tf_outbox::lapse_count.eq(tf_outbox::lapse_count + 1),
            tf_outbox::unknown_since.eq(statement_timestamp().nullable()),
            tf_outbox::next_attempt_at.eq(None::<DateTime<Utc>>),
            claim_cleared(),
        ))
        .execute(conn)
        .or_store_error(Phase::Statement)
}

/// Starts the clock of rows that became unknown without one, which the other
/// implementation does not write.
pub(crate) fn stamp_unknown(
    conn: &mut PgConnection,
    destination: &str,
) -> Result<usize, StoreError> {
    let unstamped = held
        .filter(held.field(tf_outbox::destination).eq(destination))
        .filter(held.field(tf_outbox::status).eq(OutcomeUnknown))
        .filter(held.field(tf_outbox::unknown_since).is_null())
        .select(held.field(tf_outbox::outbox_id))
        .for_update()
        .skip_locked();
    diesel::update(tf_outbox::table.filter(tf_outbox::outbox_id.eq_any(array(unstamped))))
        .set(tf_outbox::unknown_since.eq(statement_timestamp().nullable()))
        .execute(conn)
        .or_store_error(Phase::Statement)
}
