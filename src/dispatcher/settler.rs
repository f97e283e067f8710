//! Writing outcomes back, in batches.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};

use super::backend::{Answer, Outcome, Session, Settlement, Verdict};
use super::shared::{Report, Shared, Trouble};
use super::stats::add;
use crate::error::StoreError;

/// How long to leave a row alone that another transaction holds.
const LOCKED: Duration = Duration::from_millis(50);

/// An outcome that is not committed yet.
struct Pending {
    lane: usize,
    slot: bool,
    settlement: Settlement,
    /// Its claim was over before the last try, which was the last.
    over: bool,
    not_before: Instant,
}

/// Runs until every reporter is gone or the dispatcher is closed and nothing is
/// left to write.
pub(crate) fn run(shared: &Arc<Shared>, reports: &Receiver<Report>) {
    let mut session = shared.session("settler");
    let mut trouble = Trouble::new("settler");
    let mut pending: Vec<Pending> = Vec::new();
    let mut answers: Vec<Report> = Vec::new();
    let mut wait = Duration::from_millis(100);
    loop {
        match reports.recv_timeout(wait) {
            Ok(report) => sort(report, &mut pending, &mut answers),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        while pending.len() < shared.batch
            && let Ok(report) = reports.try_recv()
        {
            sort(report, &mut pending, &mut answers);
        }
        let closed = shared.closed.try_recv() == Err(crossbeam_channel::TryRecvError::Disconnected);
        if closed && (trouble.is_on() || pending.is_empty()) && answers.is_empty() {
            return;
        }
        let written = settle(shared, &mut session, &mut pending)
            .and_then(|()| answer(shared, &mut session, &mut answers));
        wait = match written {
            Ok(()) => {
                trouble.works();
                if pending.is_empty() {
                    Duration::from_millis(100)
                } else {
                    LOCKED
                }
            }
            Err(error) => {
                let wait = trouble.failed(error);
                let _ = shared.closed.recv_timeout(wait);
                Duration::ZERO
            }
        };
    }
}

fn sort(report: Report, pending: &mut Vec<Pending>, answers: &mut Vec<Report>) {
    match report {
        Report::Outcome {
            lane,
            fence,
            outcome,
            slot,
        } => pending.push(Pending {
            lane,
            slot,
            settlement: Settlement { fence, outcome },
            over: false,
            not_before: Instant::now(),
        }),
        Report::Answer { .. } => answers.push(report),
    }
}

/// Writes the outcomes whose time has come. One that the server refuses does
/// not take the others with it: they are then written one by one.
fn settle(
    shared: &Arc<Shared>,
    session: &mut dyn Session,
    pending: &mut Vec<Pending>,
) -> Result<(), StoreError> {
    let now = Instant::now();
    let mut due: Vec<Pending> = pending.extract_if(.., |p| p.not_before <= now).collect();
    if due.is_empty() {
        return Ok(());
    }
    let rest = due.split_off(due.len().min(shared.batch));
    pending.extend(rest);
    for outcome in &mut due {
        outcome.over = shared.flights.lease_over(outcome.settlement.fence);
    }
    let settlements: Vec<Settlement> = due.iter().map(|p| p.settlement.clone()).collect();
    match session.settle(&shared.worker_id, &settlements) {
        Ok(verdicts) => {
            for (outcome, verdict) in due.into_iter().zip(verdicts) {
                conclude(shared, outcome, verdict, pending);
            }
            shared.nudge();
            Ok(())
        }
        Err(error) if error.is_transient() || due.len() == 1 => {
            for outcome in due {
                keep_or_drop(shared, outcome, pending);
            }
            Err(error)
        }
        Err(_) => {
            let mut last = Ok(());
            for mut outcome in due {
                match session.settle(&shared.worker_id, std::slice::from_ref(&outcome.settlement)) {
                    Ok(verdicts) => {
                        let verdict = verdicts.first().copied().unwrap_or(Verdict::Lost);
                        conclude(shared, outcome, verdict, pending);
                    }
                    Err(error) => {
                        outcome.not_before = Instant::now() + Duration::from_secs(1);
                        keep_or_drop(shared, outcome, pending);
                        last = Err(error);
                    }
                }
            }
            shared.nudge();
            last
        }
    }
}

/// An outcome is tried until its claim lapses, and once more.
fn keep_or_drop(shared: &Arc<Shared>, outcome: Pending, pending: &mut Vec<Pending>) {
    if outcome.over {
        conclude(shared, outcome, Verdict::Lost, pending);
    } else {
        pending.push(outcome);
    }
}

fn conclude(
    shared: &Arc<Shared>,
    mut outcome: Pending,
    verdict: Verdict,
    pending: &mut Vec<Pending>,
) {
    let counters = &shared.counters;
    match verdict {
        Verdict::Locked if !outcome.over => {
            outcome.not_before = Instant::now() + LOCKED;
            pending.push(outcome);
            return;
        }
        Verdict::Locked | Verdict::Lost => {
            // Before it leaves the flights.
            if outcome.settlement.outcome != Outcome::GiveBack {
                shared.flights.let_go(outcome.settlement.fence);
            }
            // The late answer of an abandoned call that found its row resolved
            // is no loss of a claim: that claim ended with the timeout.
            if outcome.slot {
                add(&counters.lost_claims, 1);
                tracing::warn!(
                    outbox_id = %outcome.settlement.fence.outbox_id,
                    "a claim was over before its outcome could be written"
                );
            }
        }
        Verdict::Settled | Verdict::Late => {
            if verdict == Verdict::Late {
                add(&counters.late_answers, 1);
            }
            let counter = match outcome.settlement.outcome {
                Outcome::Completed { .. } => &counters.completed,
                Outcome::Retry { .. } => &counters.retried,
                Outcome::Failed { .. } => &counters.failed,
                Outcome::Unknown { .. } => &counters.unknown,
                Outcome::GiveBack => &counters.handed_back,
            };
            add(counter, 1);
        }
    }
    if outcome.slot {
        let lane = &shared.lanes[outcome.lane];
        lane.outstanding.fetch_sub(1, Ordering::AcqRel);
        if shared.flights.done(outcome.settlement.fence) {
            lane.key_freed.store(true, Ordering::Release);
        }
    }
}

/// Writes what reconcilers found. What cannot be written is forgotten: the row
/// is asked about again when its next probe is due.
fn answer(
    shared: &Arc<Shared>,
    session: &mut dyn Session,
    answers: &mut Vec<Report>,
) -> Result<(), StoreError> {
    let mut result = Ok(());
    let any = !answers.is_empty();
    for report in answers.drain(..) {
        let Report::Answer {
            lane,
            fence,
            answer,
        } = report
        else {
            continue;
        };
        if result.is_ok() {
            result = session.answer(fence, &answer).map(|written| {
                if written {
                    count_answer(shared, &answer);
                    if let Answer::Park { code, .. } = answer {
                        tracing::warn!(
                            outbox_id = %fence.outbox_id,
                            code,
                            "an outcome stays unknown and waits for an operator"
                        );
                    }
                    // The row may have held back others of its key.
                    shared.lanes[lane].key_freed.store(true, Ordering::Release);
                    shared.nudge();
                }
            });
        }
        shared.flights.question_done(fence.outbox_id);
    }
    if any {
        shared.ask_more();
    }
    result
}

fn count_answer(shared: &Shared, answer: &Answer) {
    let counters = &shared.counters;
    match answer {
        Answer::Completed => {
            add(&counters.completed, 1);
            add(&counters.reconciled, 1);
        }
        Answer::Failed { .. } => {
            add(&counters.failed, 1);
            add(&counters.reconciled, 1);
        }
        Answer::Resend { .. } => add(&counters.resent, 1),
        Answer::Park { .. } => add(&counters.parked, 1),
        Answer::Unresolved { .. } => {}
    }
}
