//! Calling senders.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::select;

use super::backend::{Fence, Outcome};
use super::flight::Begin;
use super::lane::{Job, Lane};
use super::reconcile;
use super::shared::Shared;
use super::stats::{add, subtract};
use crate::error::code;
use crate::sender::Dispatched;

/// A worker that has had nothing to do for this long ends.
const IDLE: Duration = Duration::from_secs(10);
const REMOTE_REF_BYTES: usize = 1024;

/// Sees to it that the rows waiting in a lane have workers, up to its
/// concurrency.
pub(crate) fn ensure_workers(shared: &Arc<Shared>, index: usize) {
    let lane = &shared.lanes[index];
    let wanted = lane
        .outstanding
        .load(Ordering::Acquire)
        .min(lane.destination.concurrency);
    while !lane.jobs.1.is_empty() && Lane::reserve(&lane.workers, wanted) {
        if !shared.spawn("worker", move |shared| work(&shared, index)) {
            lane.workers.fetch_sub(1, Ordering::AcqRel);
            return;
        }
    }
}

fn work(shared: &Arc<Shared>, index: usize) {
    let lane = &shared.lanes[index];
    loop {
        let job = select! {
            recv(lane.jobs.1) -> job => job.ok(),
            recv(shared.closed) -> _ => None,
            default(IDLE) => None,
        };
        match job {
            Some(job) => {
                if call(shared, index, job) == Thread::LeftBehind {
                    return;
                }
            }
            None => {
                lane.workers.fetch_sub(1, Ordering::AcqRel);
                // A row may have come between the wait and the count.
                ensure_workers(shared, index);
                return;
            }
        }
    }
}

/// What a call left of its thread.
#[derive(PartialEq, Eq)]
pub(crate) enum Thread {
    Free,
    /// The call was given up meanwhile and another worker has its place.
    LeftBehind,
}

fn call(shared: &Arc<Shared>, index: usize, (fence, entry): Job) -> Thread {
    let lane = &shared.lanes[index];
    if shared.is_stopping() {
        shared.settle(index, fence, Outcome::GiveBack);
        return Thread::Free;
    }
    let timeout = lane.destination.send_timeout;
    if shared.flights.begin(fence, shared.lease, timeout) == Begin::LeaseOver
        || !lane.admit(Instant::now())
    {
        shared.settle(index, fence, Outcome::GiveBack);
        return Thread::Free;
    }
    add(&shared.counters.begun, 1);
    let begun = Instant::now();
    let answer = catch_unwind(AssertUnwindSafe(|| lane.destination.sender.send(&entry)));
    lane.called(begun.elapsed());
    let answered = matches!(
        answer,
        Ok(Dispatched::Completed { .. } | Dispatched::Permanent { .. })
    );
    let outcome = match answer {
        Ok(dispatched) => outcome(lane, fence, dispatched),
        Err(panic) => {
            // Dropping what was thrown may run code of the sender's, and panic.
            std::mem::forget(panic);
            add(&shared.counters.panics, 1);
            tracing::error!(outbox_id = %fence.outbox_id, "a sender panicked; the outcome is unknown");
            Outcome::Unknown {
                code: Some(code::SENDER_PANICKED),
                remote_ref: None,
            }
        }
    };
    if shared.flights.answered(fence) {
        shared.record(index, answered);
        shared.report(index, fence, outcome, true);
        return Thread::Free;
    }
    shared.report(index, fence, outcome, false);
    lane.abandoned.fetch_sub(1, Ordering::AcqRel);
    subtract(&shared.counters.abandoned, 1);
    shared.nudge();
    Thread::LeftBehind
}

/// What a sender says can always be stored.
fn outcome(lane: &Lane, fence: Fence, dispatched: Dispatched) -> Outcome {
    match dispatched {
        Dispatched::Completed { remote_ref } => Outcome::Completed {
            remote_ref: storable_ref(fence, remote_ref),
        },
        Dispatched::Permanent { code } => Outcome::Failed {
            code: stable_code(fence, code),
            on_failure: lane.destination.on_failure,
        },
        Dispatched::Unknown { remote_ref } => Outcome::Unknown {
            code: None,
            remote_ref: storable_ref(fence, remote_ref),
        },
        Dispatched::Retryable { code, retry_after } => {
            let code = stable_code(fence, code);
            let attempt = fence.attempt.unsigned_abs();
            if attempt >= lane.destination.max_attempts {
                Outcome::Failed {
                    code,
                    on_failure: lane.destination.on_failure,
                }
            } else {
                let backoff = &lane.destination.backoff;
                let delay = match retry_after {
                    Some(wish) => backoff.clamped(wish),
                    None => backoff.jittered(attempt),
                };
                Outcome::Retry { code, delay }
            }
        }
    }
}

pub(crate) fn stable_code(fence: Fence, given: String) -> String {
    if code::is_stable(&given) {
        return given;
    }
    tracing::warn!(outbox_id = %fence.outbox_id, "a reason that is not a stable code was replaced");
    code::INVALID_CODE.to_owned()
}

fn storable_ref(fence: Fence, given: Option<String>) -> Option<String> {
    let given = given?;
    if given.len() <= REMOTE_REF_BYTES && !given.contains('\0') {
        return Some(given);
    }
    tracing::warn!(outbox_id = %fence.outbox_id, "a remote reference that cannot be stored was dropped");
    None
}

/// Gives up calls and questions whose time is over, and replaces their threads.
pub(crate) fn watch(shared: &Arc<Shared>) {
    const LOOK: Duration = Duration::from_millis(20);
    while shared.closed.recv_timeout(LOOK) == Err(crossbeam_channel::RecvTimeoutError::Timeout) {
        for lane in shared.give_up_calls(Some(Instant::now()), code::SEND_TIMEOUT) {
            add(&shared.counters.timeouts, 1);
            shared.record(lane, false);
            tracing::warn!("a sender did not answer in time; the outcome is unknown");
            ensure_workers(shared, lane);
        }
        for lane in reconcile::give_up(shared, Some(Instant::now())) {
            add(&shared.counters.timeouts, 1);
            tracing::warn!("a reconciler did not answer in time; the outcome stays unknown");
            reconcile::ensure_reconcilers(shared, lane);
            shared.ask_more();
        }
    }
}
