//! Reconciliation: asking about rows whose outcome is unknown, and settling
//! them with the answer.

use chrono::{DateTime, Utc};
use diesel::dsl::array;
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::sql_types::{Array, Bool, Interval};
use uuid::Uuid;

use super::bind;
use super::decode::{ENTRY, EntryRow, META, MetaRow, StatusText, record};
use super::expression::{OutcomeUnknown, after, array_position, before, statement_timestamp};
use super::fault::{OrStoreError, Phase};
use super::session::notify;
use crate::claim::KeyPolicy;
use crate::error::{StoreError, code};
use crate::probe::{Answer, Probe, ProbeFence};
use crate::record::OutboxRecord;
use crate::schema::tf_outbox;
use crate::status::OutboxStatus;

diesel::alias!(tf_outbox as held: Held);

/// Rows of the destination that have been unknown for long enough, in the order
/// in which they became so, locked.
macro_rules! ripe {
    ($probe:expr) => {
        held.filter(
            held.field(tf_outbox::destination)
                .eq($probe.destination.as_str()),
        )
        .filter(held.field(tf_outbox::status).eq(OutcomeUnknown))
        .filter(
            held.field(tf_outbox::unknown_since).le(before(
                statement_timestamp(),
                bind::interval($probe.settle_delay),
            )
            .nullable()),
        )
        .filter(
            held.field(tf_outbox::next_attempt_at).is_null().or(held
                .field(tf_outbox::next_attempt_at)
                .le(before(statement_timestamp(), bind::interval($probe.due_for)).nullable())),
        )
        .filter(held.field(tf_outbox::outbox_id).ne_all(&$probe.except))
        .order((
            held.field(tf_outbox::unknown_since),
            held.field(tf_outbox::outbox_id),
        ))
        .limit($probe.limit)
    };
}

/// Claims rows for a probe: counts it and sets the time of the next, as if no
/// answer came. An answer that leaves the row unknown sets that time anew, so
/// that the backoff runs from the answer, and a reconciler slower than its
/// backoff is not asked again while it thinks. To be run in one transaction. A
/// row that cannot be decoded is passed over until that time.
pub(crate) fn claim_probes(
    conn: &mut PgConnection,
    probe: &Probe,
) -> Result<Vec<(ProbeFence, OutboxRecord)>, StoreError> {
    let max_probes = i32::try_from(probe.max_probes).unwrap_or(i32::MAX);
    park_unresolved(conn, &probe.destination, max_probes)?;
    let ripe = ripe!(probe)
        .filter(held.field(tf_outbox::probe_count).lt(max_probes))
        .select((
            held.field(tf_outbox::outbox_id),
            held.field(tf_outbox::probe_count),
        ))
        .for_update()
        .skip_locked()
        .load::<(Uuid, i32)>(conn)
        .or_store_error(Phase::Statement)?;
    if ripe.is_empty() {
        return Ok(Vec::new());
    }
    let (ids, delays): (Vec<Uuid>, Vec<_>) = ripe
        .into_iter()
        .map(|(id, asked)| {
            let nth = u32::try_from(asked).unwrap_or(0).saturating_add(1);
            let wait = probe
                .answer_within
                .saturating_add(probe.backoff.jittered(nth));
            (id, bind::interval(wait))
        })
        .unzip();
    let rows = diesel::update(tf_outbox::table.filter(tf_outbox::outbox_id.eq_any(&ids)))
        .set((
            tf_outbox::probe_count.eq(tf_outbox::probe_count + 1),
            tf_outbox::next_attempt_at.eq(after(
                statement_timestamp(),
                delays
                    .into_sql::<Array<Interval>>()
                    .index(array_position(&ids, tf_outbox::outbox_id).assume_not_null()),
            )
            .nullable()),
        ))
        .returning((
            ENTRY,
            META,
            statement_timestamp(),
            tf_outbox::claim_seq,
            tf_outbox::probe_count,
        ))
        .load::<(EntryRow, MetaRow, DateTime<Utc>, Option<i64>, i32)>(conn)
        .or_store_error(Phase::Statement)?;
    Ok(rows
        .into_iter()
        .filter_map(|(entry, meta, now, seq, probe)| {
            let fence = ProbeFence {
                outbox_id: entry.outbox_id,
                seq,
                attempt: entry.attempt_count,
                probe,
            };
            match record(entry, meta, now) {
                Ok(record) => Some((fence, record)),
                Err(error) => {
                    tracing::warn!(outbox_id = %fence.outbox_id, %error, "a row of unknown outcome cannot be read");
                    None
                }
            }
        })
        .collect())
}

/// Marks rows that would be asked about if that had not been done so often: under a
/// setting that was lowered, or by another dispatcher.
fn park_unresolved(
    conn: &mut PgConnection,
    destination: &str,
    max_probes: i32,
) -> Result<usize, StoreError> {
    let unresolved = held
        .filter(held.field(tf_outbox::destination).eq(destination))
        .filter(held.field(tf_outbox::status).eq(OutcomeUnknown))
        .filter(held.field(tf_outbox::probe_count).ge(max_probes))
        // One that is being asked about for the last time has its answer coming.
        .filter(
            held.field(tf_outbox::next_attempt_at)
                .le(statement_timestamp().nullable()),
        )
        .filter(
            held.field(tf_outbox::last_failure)
                .is_distinct_from(code::UNRESOLVED),
        )
        .filter(
            held.field(tf_outbox::last_failure)
                .is_distinct_from(code::ATTEMPTS_EXHAUSTED),
        )
        .select(held.field(tf_outbox::outbox_id))
        .for_update()
        .skip_locked();
    diesel::update(tf_outbox::table.filter(tf_outbox::outbox_id.eq_any(array(unresolved))))
        .set(tf_outbox::last_failure.eq(code::UNRESOLVED))
        .execute(conn)
        .or_store_error(Phase::Statement)
}

/// The built-in reconciler of a destination that honours idempotency keys: puts
/// back every ripe row with attempts left. To be run in one transaction.
/// Returns how many rows were ripe.
pub(crate) fn resend_ripe(conn: &mut PgConnection, probe: &Probe) -> Result<usize, StoreError> {
    let max_attempts = i32::try_from(probe.max_attempts).unwrap_or(i32::MAX);
    let ripe = ripe!(probe)
        .filter(held.field(tf_outbox::attempt_count).lt(max_attempts))
        .select((
            held.field(tf_outbox::outbox_id),
            held.field(tf_outbox::attempt_count),
        ))
        .for_update()
        .skip_locked()
        .load::<(Uuid, i32)>(conn)
        .or_store_error(Phase::Statement)?;
    if ripe.is_empty() {
        return Ok(0);
    }
    let (ids, delays): (Vec<Uuid>, Vec<_>) = ripe
        .into_iter()
        .map(|(id, attempts)| {
            let nth = u32::try_from(attempts).unwrap_or(1).max(1);
            (id, bind::interval(probe.backoff.jittered(nth)))
        })
        .unzip();
    let resent = diesel::update(tf_outbox::table.filter(tf_outbox::outbox_id.eq_any(&ids)))
        .set((
            tf_outbox::status.eq(StatusText(OutboxStatus::Pending)),
            tf_outbox::probe_count.eq(tf_outbox::probe_count + 1),
            tf_outbox::next_attempt_at.eq(after(
                statement_timestamp(),
                delays
                    .into_sql::<Array<Interval>>()
                    .index(array_position(&ids, tf_outbox::outbox_id).assume_not_null()),
            )
            .nullable()),
            tf_outbox::unknown_since.eq(None::<DateTime<Utc>>),
            tf_outbox::claim_seq.eq(None::<i64>),
        ))
        .execute(conn)
        .or_store_error(Phase::Statement)?;
    notify(conn, Phase::Statement)?;
    Ok(resent)
}

/// Marks rows that would be sent again if they had attempts left. They stay
/// unknown: to call them failed would claim knowledge that nobody has.
pub(crate) fn park_exhausted(
    conn: &mut PgConnection,
    destination: &str,
    max_attempts: u32,
) -> Result<usize, StoreError> {
    let max_attempts = i32::try_from(max_attempts).unwrap_or(i32::MAX);
    let spent = held
        .filter(held.field(tf_outbox::destination).eq(destination))
        .filter(held.field(tf_outbox::status).eq(OutcomeUnknown))
        .filter(held.field(tf_outbox::attempt_count).ge(max_attempts))
        .filter(
            held.field(tf_outbox::last_failure)
                .is_distinct_from(code::ATTEMPTS_EXHAUSTED),
        )
        .select(held.field(tf_outbox::outbox_id))
        .for_update()
        .skip_locked();
    diesel::update(tf_outbox::table.filter(tf_outbox::outbox_id.eq_any(array(spent))))
        .set(tf_outbox::last_failure.eq(code::ATTEMPTS_EXHAUSTED))
        .execute(conn)
        .or_store_error(Phase::Statement)
}

/// Settles a row with what reconciliation found. `false`: the answer was about
/// an earlier episode, or somebody else resolved the row; nothing was written.
pub(crate) fn answer(
    conn: &mut PgConnection,
    fence: ProbeFence,
    answer: &Answer,
) -> Result<bool, StoreError> {
    macro_rules! asked {
        () => {
            diesel::update(
                tf_outbox::table
                    .find(fence.outbox_id)
                    .filter(
                        super::settle::hidden_status().eq(StatusText(OutboxStatus::OutcomeUnknown)),
                    )
                    .filter(tf_outbox::claim_seq.is_not_distinct_from(fence.seq))
                    .filter(tf_outbox::attempt_count.eq(fence.attempt))
                    .filter(tf_outbox::probe_count.eq(fence.probe)),
            )
        };
    }
    let later = |delay| {
        tf_outbox::next_attempt_at
            .eq(after(statement_timestamp(), bind::interval(delay)).nullable())
    };
    let written = match answer {
        Answer::Completed => asked!()
            .set((
                tf_outbox::status.eq(StatusText(OutboxStatus::Completed)),
                tf_outbox::completed_at.eq(statement_timestamp().nullable()),
                tf_outbox::lapse_count.eq(0),
            ))
            .execute(conn),
        Answer::Failed { code, on_failure } => asked!()
            .set((
                tf_outbox::status.eq(StatusText(OutboxStatus::Failed)),
                tf_outbox::completed_at.eq(statement_timestamp().nullable()),
                tf_outbox::last_failure.eq(code),
                tf_outbox::halts_key.eq(tf_outbox::ordering_key
                    .is_not_null()
                    .and((*on_failure == KeyPolicy::Halt).into_sql::<Bool>())),
                tf_outbox::lapse_count.eq(0),
            ))
            .execute(conn),
        Answer::Resend { delay } => asked!()
            .set((
                tf_outbox::status.eq(StatusText(OutboxStatus::Pending)),
                later(*delay),
                tf_outbox::unknown_since.eq(None::<DateTime<Utc>>),
                tf_outbox::claim_seq.eq(None::<i64>),
            ))
            .execute(conn),
        Answer::Unresolved { delay } => asked!().set(later(*delay)).execute(conn),
        Answer::Park { code, delay } => asked!()
            .set((later(*delay), tf_outbox::last_failure.eq(*code)))
            .execute(conn),
    }
    .or_store_error(Phase::Statement)?;
    if written == 1 && matches!(answer, Answer::Resend { .. }) {
        notify(conn, Phase::Statement)?;
    }
    Ok(written == 1)
}
