//! Counting what a dispatcher did.

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
            $(pub(crate) $name: AtomicU64,)*
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
    /// Panics of senders and reconcilers.
    panics,
    /// Calls that did not answer in time.
    timeouts,
    /// Threads that hang in such calls now.
    abandoned,
}

pub(crate) fn add(counter: &AtomicU64, n: usize) {
    counter.fetch_add(n as u64, Ordering::Relaxed);
}

pub(crate) fn subtract(counter: &AtomicU64, n: usize) {
    counter.fetch_sub(n as u64, Ordering::Relaxed);
}
