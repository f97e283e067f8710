//! Claims, what they bring and how they end: the words between a dispatcher and
//! its store.

use std::time::Duration;

use uuid::Uuid;

use crate::entry::OutboxEntry;

/// Every worker id of a dispatcher begins with this. Only then does the lease
/// that the claim itself wrote count: the other implementation leaves a stale
/// one behind.
pub(crate) const WORKER_PREFIX: &str = "diesel-outbox/";

/// One claim of the dispatcher. `seq` is unique over rows and claims, so a batch
/// is fenced by `outbox_id = ANY(ids) AND claim_seq = ANY(seqs)`: no pair other
/// than those that were claimed can match.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Fence {
    pub(crate) outbox_id: Uuid,
    pub(crate) seq: i64,
    /// The attempt count that the claim left. A foreign claim raises it and
    /// leaves `claim_seq` alone, so that a late answer must match it as well.
    pub(crate) attempt: i32,
}

impl Fence {
    pub(crate) fn arrays<'a>(fences: impl IntoIterator<Item = &'a Self>) -> (Vec<Uuid>, Vec<i64>) {
        fences
            .into_iter()
            .map(|fence| (fence.outbox_id, fence.seq))
            .unzip()
    }
}

/// What a failed row means for the later rows of its ordering key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KeyPolicy {
    /// They go on: each row stands for itself.
    #[default]
    Pass,
    /// They wait until an operator sends the row again
    /// ([`redrive`](crate::redrive)) or lets them pass
    /// ([`skip_failed`](crate::skip_failed)).
    Halt,
}

/// What the dispatcher claims with.
#[derive(Debug, Clone)]
pub(crate) struct Claim {
    pub(crate) destination: String,
    pub(crate) limit: usize,
    pub(crate) worker_id: String,
    pub(crate) lease: Duration,
    pub(crate) max_attempts: u32,
    /// For rows that are failed instead of being handed out.
    pub(crate) on_failure: KeyPolicy,
}

/// What a claim brought.
#[derive(Debug, Default)]
pub(crate) struct Claimed {
    /// In the order in which they came due.
    pub(crate) rows: Vec<(Fence, OutboxEntry)>,
    /// Failed because they cannot be decoded.
    pub(crate) corrupt: usize,
    /// Failed because their attempts were spent before this claim.
    pub(crate) exhausted: usize,
}

impl Claimed {
    /// Rows that were due, whatever became of them.
    pub(crate) fn found(&self) -> usize {
        self.rows.len() + self.corrupt + self.exhausted
    }
}

/// What is due, of the destinations that were asked about.
#[derive(Debug, Default)]
pub(crate) struct Due {
    /// Those that have rows without a key.
    pub(crate) ready: Vec<String>,
    /// Those that have rows with one; an earlier row may block them all.
    pub(crate) keyed: Vec<String>,
    /// How long until the next row that is not due yet falls due.
    pub(crate) next: Option<Duration>,
}

/// What a look at the keyed rows of a destination says about the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keys {
    /// There is probably more to claim.
    More,
    /// Another dispatcher was looking; nothing was read.
    Busy,
    /// What is due waits for an earlier row of its key. Whatever ends that one
    /// may tell nobody, so look again before long.
    Blocked,
    /// Nothing is due.
    Idle,
}

/// A claim of keyed rows.
#[derive(Debug)]
pub(crate) struct KeyedClaim {
    pub(crate) claimed: Claimed,
    pub(crate) keys: Keys,
    /// Where the next rotation through the keys starts: a hint, no state.
    pub(crate) cursor: String,
}

/// How a claimed row goes on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    Completed {
        remote_ref: Option<String>,
    },
    Retry {
        code: String,
        delay: Duration,
    },
    Failed {
        code: String,
        on_failure: KeyPolicy,
    },
    Unknown {
        code: Option<&'static str>,
        remote_ref: Option<String>,
    },
    /// The call was not begun: the attempt is returned.
    GiveBack,
}

/// A claim and how it ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Settlement {
    pub(crate) fence: Fence,
    pub(crate) outcome: Outcome,
}

/// What became of a settlement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is written, now or by an earlier COMMIT that did not answer.
    Settled,
    /// It is written, to a row whose outcome was unknown already.
    Late,
    /// Another transaction holds the row: try again.
    Locked,
    /// The claim is over, and another outcome stands. Nothing was written.
    Lost,
}
