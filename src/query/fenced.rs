//! What the dispatcher writes about claims of its own: outcomes, renewals,
//! hand-backs. Everything here is fenced by the claim, and takes its rows by
//! `ARRAY(SELECT … FOR UPDATE SKIP LOCKED)`: it never waits for a lock, so it is
//! part of no deadlock, and one row that an operator holds does not stop the
//! rest.

use std::collections::HashMap;
use std::time::Duration;

use diesel::dsl::array;
use diesel::pg::PgConnection;
use diesel::pg::data_types::PgInterval;
use diesel::prelude::*;
use diesel::sql_types::{Array, Bool, Interval, Text};
use uuid::Uuid;

use super::bind;
use super::decode::{Kept, StatusText};
use super::expression::{Dispatching, after, array_position, first_of, statement_timestamp};
use super::fault::{OrStoreError, Phase};
use super::session::notify;
use super::settle::claim_cleared;
use crate::claim::{Fence, KeyPolicy, Outcome, Settlement, Verdict};
use crate::error::StoreError;
use crate::schema::tf_outbox;
use crate::status::OutboxStatus;

diesel::alias!(tf_outbox as claimed: Claimed);

/// The ids among `$ids`/`$seqs` that `$worker` holds, locked.
macro_rules! mine {
    ($worker:expr, $ids:expr, $seqs:expr) => {
        claimed
            .filter(claimed.field(tf_outbox::outbox_id).eq_any($ids))
            .filter(claimed.field(tf_outbox::claim_seq).eq_any($seqs))
            .filter(claimed.field(tf_outbox::claim_worker_id).eq($worker))
            .filter(
                claimed
                    .field(tf_outbox::status)
                    .concat("")
                    .eq(StatusText(OutboxStatus::Dispatching)),
            )
            .select(claimed.field(tf_outbox::outbox_id))
            .for_update()
            .skip_locked()
    };
}

/// The element of an array parameter that belongs to the row.
macro_rules! of_row {
    ($values:expr, $sql_type:ty, $ids:expr) => {
        $values
            .into_sql::<Array<$sql_type>>()
            .index(array_position($ids, tf_outbox::outbox_id).assume_not_null())
    };
}

/// Writes a batch of outcomes, one statement a kind. To be run in one
/// transaction. The verdicts stand in the order of the settlements.
pub(crate) fn settle(
    conn: &mut PgConnection,
    worker_id: &str,
    settlements: &[Settlement],
) -> Result<Vec<Verdict>, StoreError> {
    let mut written = complete(conn, worker_id, settlements)?;
    written.extend(complete_with_ref(conn, worker_id, settlements)?);
    written.extend(retry(conn, worker_id, settlements)?);
    written.extend(fail(conn, worker_id, settlements)?);
    written.extend(give_back(conn, worker_id, settlements)?);
    for settlement in settlements {
        if let Outcome::Unknown { code, remote_ref } = &settlement.outcome {
            written.extend(unknown(
                conn,
                worker_id,
                settlement.fence,
                *code,
                remote_ref.as_deref(),
            )?);
        }
    }
    let written: std::collections::HashSet<Uuid> = written.into_iter().collect();
    let open: Vec<&Settlement> = settlements
        .iter()
        .filter(|settlement| !written.contains(&settlement.fence.outbox_id))
        .collect();
    let mut others = explain(conn, worker_id, &open)?;
    Ok(settlements
        .iter()
        .map(|settlement| {
            others
                .remove(&settlement.fence.seq)
                .unwrap_or(Verdict::Settled)
        })
        .collect())
}

fn complete(
    conn: &mut PgConnection,
    worker_id: &str,
    settlements: &[Settlement],
) -> Result<Vec<Uuid>, StoreError> {
    let chosen = settlements.iter().filter(
        |s| matches!(&s.outcome, Outcome::Completed { remote_ref } if remote_ref.is_none()),
    );
    let (ids, seqs) = Fence::arrays(chosen.map(|s| &s.fence));
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    diesel::update(
        tf_outbox::table.filter(tf_outbox::outbox_id.eq_any(array(mine!(worker_id, &ids, &seqs)))),
    )
    .set((
        tf_outbox::status.eq(StatusText(OutboxStatus::Completed)),
        tf_outbox::completed_at.eq(statement_timestamp().nullable()),
        tf_outbox::lapse_count.eq(0),
        claim_cleared(),
    ))
    .returning(tf_outbox::outbox_id)
    .load(conn)
    .or_store_error(Phase::Statement)
}

fn complete_with_ref(
    conn: &mut PgConnection,
    worker_id: &str,
    settlements: &[Settlement],
) -> Result<Vec<Uuid>, StoreError> {
    let (fences, refs): (Vec<&Fence>, Vec<&str>) = settlements
        .iter()
        .filter_map(|s| match &s.outcome {
            Outcome::Completed {
                remote_ref: Some(remote_ref),
            } => Some((&s.fence, remote_ref.as_str())),
            _ => None,
        })
        .unzip();
    let (ids, seqs) = Fence::arrays(fences);
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    diesel::update(
        tf_outbox::table.filter(tf_outbox::outbox_id.eq_any(array(mine!(worker_id, &ids, &seqs)))),
    )
    .set((
        tf_outbox::status.eq(StatusText(OutboxStatus::Completed)),
        tf_outbox::completed_at.eq(statement_timestamp().nullable()),
        tf_outbox::remote_ref.eq(of_row!(refs, Text, &ids).nullable()),
        tf_outbox::lapse_count.eq(0),
        claim_cleared(),
    ))
    .returning(tf_outbox::outbox_id)
    .load(conn)
    .or_store_error(Phase::Statement)
}

fn retry(
    conn: &mut PgConnection,
    worker_id: &str,
    settlements: &[Settlement],
) -> Result<Vec<Uuid>, StoreError> {
    let mut fences = Vec::new();
    let mut codes: Vec<&str> = Vec::new();
    let mut delays: Vec<PgInterval> = Vec::new();
    for settlement in settlements {
        if let Outcome::Retry { code, delay } = &settlement.outcome {
            fences.push(&settlement.fence);
            codes.push(code);
            delays.push(bind::interval(*delay));
        }
    }
    let (ids, seqs) = Fence::arrays(fences);
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    diesel::update(
        tf_outbox::table.filter(tf_outbox::outbox_id.eq_any(array(mine!(worker_id, &ids, &seqs)))),
    )
    .set((
        tf_outbox::status.eq(StatusText(OutboxStatus::Pending)),
        tf_outbox::next_attempt_at.eq(after(
            statement_timestamp(),
            of_row!(delays, Interval, &ids),
        )
        .nullable()),
        tf_outbox::last_failure.eq(of_row!(codes, Text, &ids).nullable()),
        tf_outbox::lapse_count.eq(0),
        tf_outbox::claim_seq.eq(None::<i64>),
        claim_cleared(),
    ))
    .returning(tf_outbox::outbox_id)
    .load(conn)
    .or_store_error(Phase::Statement)
}

fn fail(
    conn: &mut PgConnection,
    worker_id: &str,
    settlements: &[Settlement],
) -> Result<Vec<Uuid>, StoreError> {
    let mut fences = Vec::new();
    let mut codes: Vec<&str> = Vec::new();
    let mut halts: Vec<bool> = Vec::new();
    for settlement in settlements {
        if let Outcome::Failed { code, on_failure } = &settlement.outcome {
            fences.push(&settlement.fence);
            codes.push(code);
            halts.push(*on_failure == KeyPolicy::Halt);
        }
    }
    let (ids, seqs) = Fence::arrays(fences);
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    diesel::update(
        tf_outbox::table.filter(tf_outbox::outbox_id.eq_any(array(mine!(worker_id, &ids, &seqs)))),
    )
    .set((
        tf_outbox::status.eq(StatusText(OutboxStatus::Failed)),
        tf_outbox::completed_at.eq(statement_timestamp().nullable()),
        tf_outbox::last_failure.eq(of_row!(codes, Text, &ids).nullable()),
        tf_outbox::halts_key.eq(tf_outbox::ordering_key
            .is_not_null()
            .and(of_row!(halts, Bool, &ids))),
        tf_outbox::lapse_count.eq(0),
        claim_cleared(),
    ))
    .returning(tf_outbox::outbox_id)
    .load(conn)
    .or_store_error(Phase::Statement)
}

fn unknown(
    conn: &mut PgConnection,
    worker_id: &str,
    fence: Fence,
    code: Option<&str>,
    remote_ref: Option<&str>,
) -> Result<Vec<Uuid>, StoreError> {
    diesel::update(
        tf_outbox::table.filter(tf_outbox::outbox_id.eq_any(array(mine!(
            worker_id,
            vec![fence.outbox_id],
            vec![fence.seq]
        )))),
    )
    .set((
        tf_outbox::status.eq(StatusText(OutboxStatus::OutcomeUnknown)),
        tf_outbox::remote_ref.eq(remote_ref),
        tf_outbox::last_failure.eq(first_of(
            code.into_sql::<diesel::sql_types::Nullable<Text>>(),
            tf_outbox::last_failure,
        )),
        tf_outbox::unknown_since.eq(statement_timestamp().nullable()),
        tf_outbox::next_attempt_at.eq(None::<chrono::DateTime<chrono::Utc>>),
        tf_outbox::lapse_count.eq(0),
        claim_cleared(),
    ))
    .returning(tf_outbox::outbox_id)
    .load(conn)
    .or_store_error(Phase::Statement)
}

fn give_back(
    conn: &mut PgConnection,
    worker_id: &str,
    settlements: &[Settlement],
) -> Result<Vec<Uuid>, StoreError> {
    let chosen = settlements
        .iter()
        .filter(|s| s.outcome == Outcome::GiveBack);
    let (ids, seqs) = Fence::arrays(chosen.map(|s| &s.fence));
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    let given = diesel::update(
        tf_outbox::table.filter(tf_outbox::outbox_id.eq_any(array(mine!(worker_id, &ids, &seqs)))),
    )
    .set((
        tf_outbox::status.eq(StatusText(OutboxStatus::Pending)),
        tf_outbox::attempt_count.eq(tf_outbox::attempt_count - 1),
        tf_outbox::claim_seq.eq(None::<i64>),
        claim_cleared(),
    ))
    .returning(tf_outbox::outbox_id)
    .load(conn)
    .or_store_error(Phase::Statement)?;
    if !given.is_empty() {
        notify(conn, Phase::Statement)?;
    }
    Ok(given)
}

/// How a row stands that a statement passed over.
#[derive(Debug, Queryable)]
struct Found {
    outbox_id: Uuid,
    status: Kept<StatusText>,
    seq: Option<i64>,
    worker: Option<String>,
    attempt: i32,
}

/// Why a statement passed over these rows, by their `claim_seq`. An answer to a
/// row that has become unknown meanwhile is written here.
fn explain(
    conn: &mut PgConnection,
    worker_id: &str,
    open: &[&Settlement],
) -> Result<HashMap<i64, Verdict>, StoreError> {
    if open.is_empty() {
        return Ok(HashMap::new());
    }
    let ids: Vec<Uuid> = open.iter().map(|s| s.fence.outbox_id).collect();
    let found: HashMap<Uuid, Found> = tf_outbox::table
        .filter(tf_outbox::outbox_id.eq_any(ids))
        .select((
            tf_outbox::outbox_id,
            tf_outbox::status,
            tf_outbox::claim_seq,
            tf_outbox::claim_worker_id,
            tf_outbox::attempt_count,
        ))
        .load::<Found>(conn)
        .or_store_error(Phase::Statement)?
        .into_iter()
        .map(|row| (row.outbox_id, row))
        .collect();
    let mut verdicts = HashMap::with_capacity(open.len());
    for settlement in open {
        let fence = settlement.fence;
        let verdict = match found.get(&fence.outbox_id) {
            Some(Found {
                status: Kept(Some(StatusText(status))),
                seq: Some(seq),
                worker,
                attempt,
                ..
            }) if *seq == fence.seq => match status {
                OutboxStatus::Dispatching if worker.as_deref() == Some(worker_id) => {
                    Verdict::Locked
                }
                OutboxStatus::OutcomeUnknown if *attempt == fence.attempt => {
                    settle_late(conn, settlement)?
                }
                OutboxStatus::Completed | OutboxStatus::Failed
                    if status_of(&settlement.outcome) == Some(*status) =>
                {
                    Verdict::Settled
                }
                _ => Verdict::Lost,
            },
            _ => Verdict::Lost,
        };
        verdicts.insert(fence.seq, verdict);
    }
    Ok(verdicts)
}

fn status_of(outcome: &Outcome) -> Option<OutboxStatus> {
    match outcome {
        Outcome::Completed { .. } => Some(OutboxStatus::Completed),
        Outcome::Failed { .. } => Some(OutboxStatus::Failed),
        Outcome::Unknown { .. } => Some(OutboxStatus::OutcomeUnknown),
        Outcome::Retry { .. } | Outcome::GiveBack => None,
    }
}

/// An answer that comes after the row became unknown (its send timed out, or
/// its claim lapsed) is still the answer, unless anybody claimed since.
fn settle_late(conn: &mut PgConnection, settlement: &Settlement) -> Result<Verdict, StoreError> {
    let fence = settlement.fence;
    // Rows of an unknown outcome have no claim: `claim_seq` and the attempt
    // count together name the call that the answer belongs to.
    macro_rules! late {
        () => {
            diesel::update(
                tf_outbox::table.filter(
                    tf_outbox::outbox_id.eq_any(array(
                        claimed
                            .filter(claimed.field(tf_outbox::outbox_id).eq(fence.outbox_id))
                            .filter(claimed.field(tf_outbox::claim_seq).eq(fence.seq))
                            .filter(claimed.field(tf_outbox::attempt_count).eq(fence.attempt))
                            .filter(
                                claimed
                                    .field(tf_outbox::status)
                                    .concat("")
                                    .eq(StatusText(OutboxStatus::OutcomeUnknown)),
                            )
                            .select(claimed.field(tf_outbox::outbox_id))
                            .for_update()
                            .skip_locked(),
                    )),
                ),
            )
        };
    }
    let written = match &settlement.outcome {
        // It is unknown already, or was never begun and lapsed.
        Outcome::Unknown { .. } => return Ok(Verdict::Settled),
        Outcome::GiveBack => return Ok(Verdict::Lost),
        Outcome::Completed { remote_ref } => late!()
            .set((
                tf_outbox::status.eq(StatusText(OutboxStatus::Completed)),
                tf_outbox::completed_at.eq(statement_timestamp().nullable()),
                tf_outbox::remote_ref.eq(first_of(
                    remote_ref
                        .as_deref()
                        .into_sql::<diesel::sql_types::Nullable<Text>>(),
                    tf_outbox::remote_ref,
                )),
                tf_outbox::lapse_count.eq(0),
            ))
            .execute(conn),
        Outcome::Failed { code, on_failure } => late!()
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
        Outcome::Retry { code, delay } => late!()
            .set((
                tf_outbox::status.eq(StatusText(OutboxStatus::Pending)),
                tf_outbox::next_attempt_at
                    .eq(after(statement_timestamp(), bind::interval(*delay)).nullable()),
                tf_outbox::last_failure.eq(code),
                tf_outbox::lapse_count.eq(0),
                tf_outbox::claim_seq.eq(None::<i64>),
                tf_outbox::unknown_since.eq(None::<chrono::DateTime<chrono::Utc>>),
            ))
            .execute(conn),
    }
    .or_store_error(Phase::Statement)?;
    // None written: a probe holds the row at this moment.
    Ok(if written == 1 {
        Verdict::Late
    } else {
        Verdict::Locked
    })
}

/// Every claim that `worker_id` holds.
pub(crate) fn held(conn: &mut PgConnection, worker_id: &str) -> Result<Vec<Fence>, StoreError> {
    let rows = tf_outbox::table
        .filter(tf_outbox::status.eq(Dispatching))
        .filter(tf_outbox::claim_worker_id.eq(worker_id))
        .filter(tf_outbox::claim_seq.is_not_null())
        .select((
            tf_outbox::outbox_id,
            tf_outbox::claim_seq.assume_not_null(),
            tf_outbox::attempt_count,
        ))
        .load::<(Uuid, i64, i32)>(conn)
        .or_store_error(Phase::Read)?;
    Ok(rows
        .into_iter()
        .map(|(outbox_id, seq, attempt)| Fence {
            outbox_id,
            seq,
            attempt,
        })
        .collect())
}

/// Renews the leases of these claims; returns the `claim_seq` of those that
/// are renewed. A row that is missing is locked, settled or lost.
pub(crate) fn renew(
    conn: &mut PgConnection,
    worker_id: &str,
    fences: &[Fence],
    lease: Duration,
) -> Result<Vec<i64>, StoreError> {
    let (ids, seqs) = Fence::arrays(fences);
    diesel::update(
        tf_outbox::table.filter(tf_outbox::outbox_id.eq_any(array(mine!(worker_id, &ids, &seqs)))),
    )
    .set((
        tf_outbox::claim_taken_at.eq(statement_timestamp().nullable()),
        tf_outbox::claim_expires_at
            .eq(after(statement_timestamp(), bind::interval(lease)).nullable()),
    ))
    .returning(tf_outbox::claim_seq.assume_not_null())
    .load(conn)
    .or_store_error(Phase::Statement)
}
