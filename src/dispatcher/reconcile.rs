//! Asking reconcilers about rows whose outcome is unknown.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crossbeam_channel::select;

use super::backend::{Answer, Probe, Session};
use super::destination::Kind;
use super::lane::{Lane, PROBES, Question};
use super::shared::{Report, Shared};
use super::stats::add;
use crate::error::{StoreError, code};
use crate::sender::{OutboxReconciler, Reconciled};

/// Rows put back by one statement.
const BATCH: i64 = 500;

/// Looks for unknown outcomes of one destination that are ripe, and sees to
/// each: by the built-in reconciler of an idempotent remote, or by asking.
pub(crate) fn look(
    shared: &Arc<Shared>,
    session: &mut dyn Session,
    index: usize,
) -> Result<(), StoreError> {
    let lane = &shared.lanes[index];
    let quiet = shared.flights.quiet();
    let mut probe = Probe {
        destination: &lane.destination.name,
        settle_delay: lane.destination.settle_delay(),
        backoff: &lane.destination.backoff,
        limit: BATCH,
        except: &quiet,
        max_attempts: lane.destination.max_attempts,
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
            probe.backoff = &lane.destination.probe_backoff;
            // A row that is claimed for a probe and then not asked about would
            // wait for its next one.
            probe.limit = PROBES.saturating_sub(lane.questions.1.len()) as i64;
            if probe.limit > 0 {
                for question in session.claim_probes(&probe)? {
                    ask(shared, index, question);
                }
            }
        }
    }
    Ok(())
}

fn ask(shared: &Arc<Shared>, index: usize, question: Question) {
    let lane = &shared.lanes[index];
    if lane.questions.0.try_send(question).is_ok()
        && Lane::reserve(&lane.reconcilers, PROBES)
        && !shared.spawn("reconciler", move |shared| answer_all(&shared, index))
    {
        lane.reconcilers.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Asks until there is nothing to ask for the moment.
fn answer_all(shared: &Arc<Shared>, index: usize) {
    const LINGER: Duration = Duration::from_millis(100);
    let lane = &shared.lanes[index];
    if let Kind::Reconciled(reconciler) = &lane.destination.kind {
        loop {
            let question = select! {
                recv(lane.questions.1) -> question => question.ok(),
                recv(shared.closed) -> _ => None,
                default(LINGER) => None,
            };
            match question {
                Some(question) if !shared.is_stopping() => {
                    ask_one(shared, lane, reconciler.as_ref(), &question);
                    if lane.questions.1.is_empty() {
                        shared.ask_more();
                    }
                }
                _ => break,
            }
        }
    }
    lane.reconcilers.fetch_sub(1, Ordering::AcqRel);
}

fn ask_one(
    shared: &Arc<Shared>,
    lane: &Lane,
    reconciler: &dyn OutboxReconciler,
    (fence, record): &Question,
) {
    add(&shared.counters.probes, 1);
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
        },
        Ok(Reconciled::Resend) if fence.attempt() >= lane.destination.max_attempts => Answer::Park,
        Ok(Reconciled::Resend) => Answer::Resend {
            delay: Duration::ZERO,
        },
        Ok(Reconciled::Unresolved) => return,
        Err(panic) => {
            std::mem::forget(panic);
            add(&shared.counters.panics, 1);
            tracing::error!("a reconciler panicked; the outcome stays unknown");
            return;
        }
    };
    let _ = shared.reports.send(Report::Answer {
        fence: *fence,
        answer,
    });
}
