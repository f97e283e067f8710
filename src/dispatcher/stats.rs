//! Counting what a dispatcher did.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$meta:meta])* $name:ident),* $(,)?) => {
        /// What a dispatcher has done since it started.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Stats {
            $($(#[$meta])* pub $name: u64,)*
        }

        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: Arc<AtomicU64>,)*
        }

        impl Counters {
            pub(crate) fn read(&self) -> Stats {
                Stats { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Rows claimed.
    claimed,
    /// Calls of a sender begun.
    begun,
    /// Rows settled as completed, late answers and reconciliation included.
    completed,
    /// Rows put back after a retryable answer.
    retried,
    /// Rows settled as failed.
    failed,
    /// Rows settled as unknown by this process.
    unknown,
    /// Answers that came after the row had become unknown, and were used.
    late_answers,
    /// Outcomes that could not be written because the claim was over.
    lost_claims,
    /// Rows handed back because their call was not begun.
    handed_back,
    /// Claims that this process found lapsed, its own or another's.
    lapsed,
    /// Questions to reconcilers.
    probes,
    /// Unknown outcomes settled by a reconciler's answer.
    reconciled,
    /// Unknown outcomes put back to be sent again.
    resent,
    /// Answers after which an unknown outcome waits for an operator.
    parked,
    /// Panics of senders and reconcilers.
    panics,
    /// Calls that did not answer in time.
    timeouts,
    /// How often a circuit breaker has opened.
    breaker_opened,
    /// Claims that were taken and never came to hand, because the answer of the
    /// database was lost or late: found, and handed back.
    orphans,
    /// Threads that hang in such calls now.
    abandoned,
    /// Threads that hang in the database now.
    abandoned_sessions,
}

/// Why nothing is claimed for a destination at the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pause {
    /// As many of its threads hang in calls as
    /// [`with_max_abandoned`](crate::Destination::with_max_abandoned) allows.
    ThreadsHang,
    /// Its circuit breaker is open, or half-open with its one call on the way.
    BreakerOpen,
}

/// How one destination stands at the moment.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DestinationState {
    /// Its name.
    pub name: String,
    /// Rows claimed and not settled yet, those whose call runs included.
    pub in_hand: usize,
    /// Threads that call, or wait for a call.
    pub workers: usize,
    /// Threads that hang in calls which timed out.
    pub abandoned: usize,
    /// Whether nothing is claimed for it, and why.
    pub paused: Option<Pause>,
}

impl fmt::Debug for DestinationState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DestinationState")
            .field("in_hand", &self.in_hand)
            .field("workers", &self.workers)
            .field("abandoned", &self.abandoned)
            .field("paused", &self.paused)
            .finish_non_exhaustive()
    }
}

pub(crate) fn add(counter: &AtomicU64, n: usize) {
    counter.fetch_add(n as u64, Ordering::Relaxed);
}

pub(crate) fn subtract(counter: &AtomicU64, n: usize) {
    counter.fetch_sub(n as u64, Ordering::Relaxed);
}
