//! What a settlement must match.

use uuid::Uuid;

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
