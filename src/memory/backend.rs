//! The dispatcher's backend in memory.

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};

use super::Inner;
use super::table::Table;
use crate::claim::{Claim, Claimed, Due, Fence, KeyedClaim, Settlement, Verdict};
use crate::dispatcher::backend::{Backend, Session};
use crate::dispatcher::bell::Ear;
use crate::error::StoreError;
use crate::probe::{Answer, Probe, ProbeFence};
use crate::record::OutboxRecord;

/// How often a listener says that it hears.
const ALIVE: Duration = Duration::from_millis(500);

pub(crate) struct MemoryBackend {
    pub(super) inner: Arc<Inner>,
}

impl Backend for MemoryBackend {
    fn session(&self, _role: &'static str) -> Box<dyn Session> {
        Box::new(MemorySession {
            inner: Arc::clone(&self.inner),
        })
    }

    fn listen(&self, ear: &Ear) {
        let (changed, moved) = (self.inner.changed(), self.inner.clock.moved());
        // Whatever may be due from now on is heard of.
        ear.allow_rest(Duration::MAX);
        ear.ring();
        loop {
            ear.hears();
            match ear.listen_to([&changed, &moved], ALIVE) {
                Ok(true) => ear.ring(),
                Ok(false) => {}
                Err(_) => return,
            }
        }
    }
}

struct MemorySession {
    inner: Arc<Inner>,
}

impl MemorySession {
    fn with<T>(&self, work: impl FnOnce(&mut Table, DateTime<Utc>) -> T) -> T {
        self.inner.with(work)
    }
}

impl Session for MemorySession {
    fn due(&mut self, destinations: &[String]) -> Result<Due, StoreError> {
        Ok(self.with(|table, now| table.due(destinations, now)))
    }

    fn claim(&mut self, claim: &Claim) -> Result<Claimed, StoreError> {
        Ok(self.with(|table, now| table.claim(claim, now)))
    }

    fn claim_keyed(&mut self, claim: &Claim, _cursor: &str) -> Result<KeyedClaim, StoreError> {
        Ok(self.with(|table, now| table.claim_keyed(claim, now)))
    }

    fn held(&mut self, worker_id: &str) -> Result<Vec<Fence>, StoreError> {
        Ok(self.with(|table, _| table.held(worker_id)))
    }

    fn settle(
        &mut self,
        worker_id: &str,
        settlements: &[Settlement],
    ) -> Result<Vec<Verdict>, StoreError> {
        let verdicts = self.with(|table, now| {
            settlements
                .iter()
                .map(|settlement| table.settle(worker_id, settlement, now))
                .collect()
        });
        self.inner.tell();
        Ok(verdicts)
    }

    fn renew(
        &mut self,
        worker_id: &str,
        fences: &[Fence],
        lease: Duration,
    ) -> Result<Vec<i64>, StoreError> {
        Ok(self.with(|table, now| table.renew(worker_id, fences, lease, now)))
    }

    fn lapse(
        &mut self,
        destinations: &[String],
        foreign_lease: Duration,
        limit: i64,
    ) -> Result<usize, StoreError> {
        let limit = usize::try_from(limit).unwrap_or(0);
        Ok(self.with(|table, now| table.lapse(destinations, foreign_lease, limit, now)))
    }

    fn with_unknown(&mut self, destinations: &[String]) -> Result<Vec<String>, StoreError> {
        Ok(self.with(|table, _| table.with_unknown(destinations)))
    }

    fn claim_probes(
        &mut self,
        probe: &Probe,
    ) -> Result<Vec<(ProbeFence, OutboxRecord)>, StoreError> {
        Ok(self.with(|table, now| table.claim_probes(probe, now)))
    }

    fn resend_ripe(&mut self, probe: &Probe) -> Result<usize, StoreError> {
        let resent = self.with(|table, now| table.resend_ripe(probe, now));
        self.inner.tell();
        Ok(resent)
    }

    fn answer(&mut self, fence: ProbeFence, answer: &Answer) -> Result<bool, StoreError> {
        let written = self.with(|table, now| table.answer(fence, answer, now));
        self.inner.tell();
        Ok(written)
    }
}
