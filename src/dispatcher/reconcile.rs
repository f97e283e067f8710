//! Asking reconcilers about rows whose outcome is unknown.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::select;

use super::backend::{Answer, Probe, Session};
use super::destination::Kind;
use super::lane::{Lane, Question};
use super::shared::{Report, Shared};
use super::stats::{add, subtract};
use super::time::from_now;
use super::worker::Thread;
use crate::error::{StoreError, code};
use crate::sender::{OutboxReconciler, Reconciled};

/// Rows put back by one statement.
const BATCH: i64 = 500;

/// Looks for unknown outcomes of one destination that are ripe, and sees to
/// each: by the built-in reconciler of an idempotent remote, or by asking. Rows
/// that were asked about less than `due_for` ago are passed over.
pub(crate) fn look(
    shared: &Arc<Shared>,
    session: &mut dyn Session,
    index: usize,
    due_for: Duration,
) -> Result<(), StoreError> {
    let lane = &shared.lanes[index];
    let quiet = shared.flights.quiet();
    let mut probe = Probe {
        destination: lane.destination.name.clone(),
        settle_delay: lane.destination.settle_delay(),
        due_for,
        answer_within: lane.destination.send_timeout,
        backoff: lane.destination.backoff,
        limit: BATCH,
        except: quiet,
        max_attempts: lane.destination.max_attempts,
        max_probes: lane.destination.max_probes,
    };
    match &lane.destination.kind {
        Kind::Manual => {}
        Kind::Idempotent => loop {
            let resent = session.resend_ripe(&probe)?;
            add(&shared.counters.resent, resent);
            shared.nudge();
            if (resent as i64) < BATCH || shared.is_stopping() {
                break;
            }
        },
        Kind::Reconciled(_) => {
            probe.backoff = lane.destination.probe_backoff;
            let probes = lane.destination.probes;
            let left_behind = lane.abandoned_questions.load(Ordering::Acquire);
            // A row that is claimed for a probe and not asked about at once would
            // be another's to ask about before it is answered.
            let room = match left_behind < lane.destination.max_abandoned {
                true => probes.saturating_sub(shared.flights.in_question(index)),
                false => 0,
            };
            probe.limit = room as i64;
            let questions = match room {
                0 => Vec::new(),
                _ => session.claim_probes(&probe)?,
            };
            let full = questions.len() == room;
            for question in questions {
                ask(shared, index, question);
            }
            // With nobody in question, nobody would say that there is room again.
            let more = full && shared.flights.in_question(index) > 0;
            lane.more_questions.store(more, Ordering::Release);
            ensure_reconcilers(shared, index);
        }
    }
    Ok(())
}

fn ask(shared: &Arc<Shared>, index: usize, question: Question) {
    let lane = &shared.lanes[index];
    let row = question.0.outbox_id;
    let until = from_now(lane.destination.send_timeout);
    shared.flights.ask(index, row, until);
    if lane.questions.0.try_send(question).is_err() {
        shared.flights.question_done(row);
    }
}

pub(crate) fn ensure_reconcilers(shared: &Arc<Shared>, index: usize) {
    let lane = &shared.lanes[index];
    while !lane.questions.1.is_empty() && Lane::reserve(&lane.reconcilers, lane.destination.probes)
    {
        if !shared.spawn("reconciler", move |shared| answer_all(&shared, index)) {
            lane.reconcilers.fetch_sub(1, Ordering::AcqRel);
            return;
        }
    }
}

/// Asks until there is nothing to ask for the moment.
fn answer_all(shared: &Arc<Shared>, index: usize) {
    const LINGER: Duration = Duration::from_millis(100);
    let lane = &shared.lanes[index];
    let Kind::Reconciled(reconciler) = &lane.destination.kind else {
        return;
    };
    loop {
        let question = select! {
            recv(lane.questions.1) -> question => question.ok(),
            recv(shared.closed) -> _ => None,
            default(LINGER) => None,
        };
        let Some(question) = question else { break };
        if shared.is_stopping() {
            shared.flights.question_done(question.0.outbox_id);
        } else if ask_one(shared, index, reconciler.as_ref(), &question) == Thread::LeftBehind {
            lane.abandoned_questions.fetch_sub(1, Ordering::AcqRel);
            subtract(&shared.counters.abandoned, 1);
            return;
        }
    }
    lane.reconcilers.fetch_sub(1, Ordering::AcqRel);
    // A question may have come between the wait and the count.
    ensure_reconcilers(shared, index);
}

/// Gives up questions, all or those whose time is over; returns their lanes.
pub(crate) fn give_up(shared: &Shared, now: Option<Instant>) -> Vec<usize> {
    let given = shared.flights.give_up_questions(now);
    for index in &given {
        let lane = &shared.lanes[*index];
        lane.abandoned_questions.fetch_add(1, Ordering::AcqRel);
        lane.reconcilers.fetch_sub(1, Ordering::AcqRel);
        add(&shared.counters.abandoned, 1);
    }
    given
}

/// Returns whether the thread still has its place.
fn ask_one(
    shared: &Arc<Shared>,
    index: usize,
    reconciler: &dyn OutboxReconciler,
    (fence, record): &Question,
) -> Thread {
    let lane = &shared.lanes[index];
    add(&shared.counters.probes, 1);
    let again = || lane.destination.probe_backoff.jittered(fence.asked());
    let unresolved = || match fence.asked() >= lane.destination.max_probes {
        true => Answer::Park {
            code: code::UNRESOLVED,
            delay: again(),
        },
        false => Answer::Unresolved { delay: again() },
    };
    let reconciled = catch_unwind(AssertUnwindSafe(|| reconciler.reconcile(record)));
    let answer = match reconciled {
        Ok(Reconciled::Completed) => Answer::Completed,
        Ok(Reconciled::Failed { code }) => Answer::Failed {
            code: if code::is_stable(&code) {
                code
            } else {
                tracing::warn!("a reason that is not a stable code was replaced");
                code::INVALID_CODE.to_owned()
            },
            on_failure: lane.destination.on_failure,
        },
        Ok(Reconciled::Resend) if fence.attempts() >= lane.destination.max_attempts => {
            Answer::Park {
                code: code::ATTEMPTS_EXHAUSTED,
                delay: again(),
            }
        }
        Ok(Reconciled::Resend) => Answer::Resend {
            delay: Duration::ZERO,
        },
        Ok(Reconciled::Unresolved) => unresolved(),
        Err(panic) => {
            std::mem::forget(panic);
            add(&shared.counters.panics, 1);
            tracing::error!("a reconciler panicked; the outcome stays unknown");
            unresolved()
        }
    };
    let in_time = shared.flights.question_answered(fence.outbox_id);
    // Late it is used all the same, unless somebody else has asked since.
    let _ = shared.reports.send(Report::Answer {
        lane: index,
        fence: *fence,
        answer,
    });
    if in_time {
        Thread::Free
    } else {
        Thread::LeftBehind
    }
}
