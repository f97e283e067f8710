//! Questions about unknown outcomes, and their answers: the words between a
//! dispatcher and its store.

use std::time::Duration;

use uuid::Uuid;

use crate::backoff::Backoff;
use crate::claim::KeyPolicy;

/// Which rows to ask about.
#[derive(Debug, Clone)]
pub(crate) struct Probe {
    pub(crate) destination: String,
    /// How long a row must have been unknown.
    pub(crate) settle_delay: Duration,
    /// How long it must have been time to ask.
    pub(crate) due_for: Duration,
    /// How long the asker has for its answer: nobody else asks meanwhile.
    pub(crate) answer_within: Duration,
    /// When to ask again, by the number of times asked.
    pub(crate) backoff: Backoff,
    pub(crate) limit: i64,
    /// Rows whose call still runs in this process, or that it is asking about.
    pub(crate) except: Vec<Uuid>,
    pub(crate) max_attempts: u32,
    /// A row that has been asked about so often is not asked about any more.
    pub(crate) max_probes: u32,
}

/// What an answer must match: the episode of uncertainty that it is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ProbeFence {
    pub(crate) outbox_id: Uuid,
    pub(crate) seq: Option<i64>,
    pub(crate) attempt: i32,
    pub(crate) probe: i32,
}

impl ProbeFence {
    pub(crate) const fn attempts(self) -> u32 {
        self.attempt.unsigned_abs()
    }

    /// How often the row has been asked about, this time included.
    pub(crate) const fn asked(self) -> u32 {
        self.probe.unsigned_abs()
    }
}

/// What reconciliation decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    Completed,
    Failed {
        code: String,
        on_failure: KeyPolicy,
    },
    Resend {
        delay: Duration,
    },
    /// Stays unknown, to be asked about again after the delay.
    Unresolved {
        delay: Duration,
    },
    /// Stays unknown, for an operator, with the reason on record. While there are
    /// questions left it is asked about again: the remote may come to know more.
    Park {
        code: &'static str,
        delay: Duration,
    },
}
