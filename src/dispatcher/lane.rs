//! One destination at work: its channel, its threads, its free slots.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

use super::backend::{Fence, ProbeFence};
use super::breaker::{Breaker, Passage, Turn};
use super::destination::{Destination, Kind};
use super::rate::Rate;
use super::stats::{DestinationState, Pause};
use crate::entry::OutboxEntry;
use crate::record::OutboxRecord;

/// A claimed row on its way to a worker.
pub(crate) type Job = (Fence, OutboxEntry);
/// A row of unknown outcome on its way to a reconciler.
pub(crate) type Question = (ProbeFence, OutboxRecord);

/// Calls are fast if they take less than this on the average.
const FAST: Duration = Duration::from_millis(10);

/// What a lane has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Room {
    /// So many rows, one at least.
    For(usize),
    /// None until an outcome is committed.
    Full,
    /// The rate allows none for this long.
    Later(Duration),
    /// The breaker is open, or too many threads hang: none for this long, or until
    /// something ends.
    Paused(Option<Duration>),
}

pub(crate) struct Lane {
    /// Its place in the order of registration, which logs may tell.
    number: usize,
    pub(crate) destination: Destination,
    breaker: Option<Breaker>,
    rate: Option<Rate>,
    pub(crate) jobs: (Sender<Job>, Receiver<Job>),
    pub(crate) questions: (Sender<Question>, Receiver<Question>),
    /// Rows claimed and not yet settled. A slot is free only when the outcome is
    /// committed: a slow settler slows the claimer, and memory is bounded.
    pub(crate) outstanding: AtomicUsize,
    /// Worker threads that are not left behind in a call.
    pub(crate) workers: AtomicUsize,
    /// Threads left behind in a call that timed out.
    pub(crate) abandoned: AtomicUsize,
    /// Reconciler threads that are not left behind in a question.
    pub(crate) reconcilers: AtomicUsize,
    /// Threads left behind in a question that timed out.
    pub(crate) abandoned_questions: AtomicUsize,
    /// Whether the last look found more to ask about than there was room for.
    pub(crate) more_questions: AtomicBool,
    /// A row with an ordering key was settled: the next of its key may go.
    pub(crate) key_freed: AtomicBool,
    /// Whether the cap of abandoned threads has been logged.
    pub(crate) capped: AtomicBool,
    /// A running mean of the duration of calls, in µs.
    mean_call: AtomicU64,
}

impl Lane {
    pub(crate) fn new(number: usize, destination: Destination, batch: usize) -> Self {
        let prefetch = destination.prefetch.unwrap_or(batch);
        Self {
            number,
            breaker: destination.breaker.map(Breaker::new),
            rate: destination.rate.and_then(Rate::new),
            jobs: bounded(destination.concurrency + prefetch),
            questions: bounded(destination.probes),
            outstanding: AtomicUsize::new(0),
            workers: AtomicUsize::new(0),
            abandoned: AtomicUsize::new(0),
            reconcilers: AtomicUsize::new(0),
            abandoned_questions: AtomicUsize::new(0),
            more_questions: AtomicBool::new(false),
            key_freed: AtomicBool::new(false),
            capped: AtomicBool::new(false),
            mean_call: AtomicU64::new(u64::MAX),
            destination,
        }
    }

    /// How many rows may be claimed now.
    pub(crate) fn room(&self, batch: usize, now: Instant) -> Room {
        if self.abandoned.load(Ordering::Acquire) >= self.destination.max_abandoned {
            if !self.capped.swap(true, Ordering::AcqRel) {
                tracing::warn!(
                    destination = self.number,
                    threads = self.destination.max_abandoned,
                    "an outbox destination has all its threads hanging; nothing is claimed for it"
                );
            }
            return Room::Paused(None);
        }
        if self.capped.swap(false, Ordering::AcqRel) {
            tracing::info!(
                destination = self.number,
                "an outbox destination has threads again"
            );
        }
        let prefetch = match (&self.destination.kind, self.destination.prefetch) {
            (Kind::Manual, _) => 0,
            // A token is for a row that is begun now.
            _ if self.rate.is_some() => 0,
            (_, Some(rows)) => rows,
            (_, None) if self.is_fast() => batch,
            (_, None) => 0,
        };
        let free = (self.destination.concurrency + prefetch)
            .saturating_sub(self.outstanding.load(Ordering::Acquire))
            .min(batch);
        let passed = match self.breaker.as_ref().map(|b| b.passage(now)) {
            None | Some(Passage::All) => free,
            Some(Passage::One) => free.min(1),
            Some(Passage::None(wait)) => return Room::Paused(wait),
        };
        match (passed, &self.rate) {
            (0, _) => Room::Full,
            (_, Some(rate)) => match rate.room(passed) {
                Ok(rows) => Room::For(rows),
                Err(wait) => Room::Later(wait),
            },
            (_, None) => Room::For(passed),
        }
    }

    /// For whoever looks on.
    pub(crate) fn state(&self, now: Instant) -> DestinationState {
        let abandoned = self.abandoned.load(Ordering::Acquire);
        let passage = self.breaker.as_ref().map(|b| b.passage(now));
        DestinationState {
            name: self.destination.name.clone(),
            in_hand: self.outstanding.load(Ordering::Acquire),
            workers: self.workers.load(Ordering::Acquire),
            abandoned,
            paused: if abandoned >= self.destination.max_abandoned {
                Some(Pause::ThreadsHang)
            } else if matches!(passage, Some(Passage::None(_))) {
                Some(Pause::BreakerOpen)
            } else {
                None
            },
        }
    }

    /// Rows were claimed.
    pub(crate) fn spend(&self, rows: usize) {
        if let Some(rate) = &self.rate {
            rate.spend(rows);
        }
    }

    /// A call is about to begin. `false`: the breaker has opened meanwhile.
    pub(crate) fn admit(&self, now: Instant) -> bool {
        self.breaker.as_ref().is_none_or(|b| b.admit(now))
    }

    /// A call ended: the remote answered it, be it with a refusal, or failed to.
    pub(crate) fn record(&self, answered: bool, now: Instant) -> Turn {
        let Some(breaker) = &self.breaker else {
            return Turn::Unchanged;
        };
        let turn = breaker.record(answered, now);
        match turn {
            Turn::Opened => tracing::warn!(
                destination = self.number,
                "an outbox destination fails again and again; it is left alone for a while"
            ),
            Turn::Closed => tracing::info!(
                destination = self.number,
                "an outbox destination answers again"
            ),
            Turn::Unchanged => {}
        }
        turn
    }

    fn is_fast(&self) -> bool {
        u128::from(self.mean_call.load(Ordering::Relaxed)) < FAST.as_micros()
    }

    pub(crate) fn called(&self, took: Duration) {
        let took = u64::try_from(took.as_micros()).unwrap_or(u64::MAX / 2);
        let mean = self.mean_call.load(Ordering::Relaxed);
        let next = if mean == u64::MAX {
            took
        } else {
            mean - mean / 8 + took / 8
        };
        self.mean_call.store(next, Ordering::Relaxed);
    }

    /// A reservation of one of `limit` threads in `threads`.
    pub(crate) fn reserve(threads: &AtomicUsize, limit: usize) -> bool {
        threads
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| {
                (n < limit).then_some(n + 1)
            })
            .is_ok()
    }
}
