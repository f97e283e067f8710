//! The seam: what the dispatcher needs of its store. No thread of the
//! dispatcher sees a connection or a query.

use std::time::Duration;

use super::bell::Ear;
pub(crate) use crate::claim::{
    Claim, Claimed, Due, Fence, KeyedClaim, Keys, Outcome, Settlement, Verdict,
};
use crate::error::StoreError;
pub(crate) use crate::probe::{Answer, Probe, ProbeFence};
use crate::record::OutboxRecord;

/// A store that dispatchers work on.
pub(crate) trait Backend: Send + Sync + 'static {
    /// A session for one thread, named in logs and on the server. Connects when
    /// first used, and again after a failure.
    fn session(&self, role: &'static str) -> Box<dyn Session>;

    /// Rings whenever there may be new work, and lets the claimer rest for as long
    /// as it is sure to be woken, until the dispatcher ends.
    fn listen(&self, ear: &Ear);
}

/// Each call is one transaction or one statement.
pub(crate) trait Session: Send {
    /// Which of `destinations` have something due.
    fn due(&mut self, destinations: &[String]) -> Result<Due, StoreError>;
    /// Claims rows without an ordering key.
    fn claim(&mut self, claim: &Claim) -> Result<Claimed, StoreError>;
    /// Claims rows with one, each the head of its key. `cursor` is what the last
    /// call for the destination returned, at first empty.
    fn claim_keyed(&mut self, claim: &Claim, cursor: &str) -> Result<KeyedClaim, StoreError>;
    /// What the store holds as claimed by `worker_id`.
    fn held(&mut self, worker_id: &str) -> Result<Vec<Fence>, StoreError>;
    fn settle(
        &mut self,
        worker_id: &str,
        settlements: &[Settlement],
    ) -> Result<Vec<Verdict>, StoreError>;
    /// Returns the `seq` of the claims that are renewed.
    fn renew(
        &mut self,
        worker_id: &str,
        fences: &[Fence],
        lease: Duration,
    ) -> Result<Vec<i64>, StoreError>;
    fn lapse(
        &mut self,
        destinations: &[String],
        foreign_lease: Duration,
        limit: i64,
    ) -> Result<usize, StoreError>;
    /// Which of `destinations` have rows of unknown outcome.
    fn with_unknown(&mut self, destinations: &[String]) -> Result<Vec<String>, StoreError>;
    fn claim_probes(
        &mut self,
        probe: &Probe,
    ) -> Result<Vec<(ProbeFence, OutboxRecord)>, StoreError>;
    fn resend_ripe(&mut self, probe: &Probe) -> Result<usize, StoreError>;
    fn answer(&mut self, fence: ProbeFence, answer: &Answer) -> Result<bool, StoreError>;
}
