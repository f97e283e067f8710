//! Sessions that answer by a deadline.
//!
//! What talks to the database may wait for ever inside its client library: a server
//! that is frozen, a network that swallows packets. So it runs on a thread of its
//! own, and whoever needs the answer waits for it on a channel, with a deadline. At
//! the deadline the thread is left behind with its connection, counted and capped,
//! and the next question is put to a new pair. What the thread left behind still
//! brings about is for others to find: a claim by [`Claimer`](super::claimer), the
//! rest by leases.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, select};

use super::backend::{
    Answer, Backend, Claim, Claimed, Due, Fence, KeyedClaim, Probe, ProbeFence, Session,
    Settlement, Verdict,
};
use super::stats::{add, subtract};
use crate::error::StoreError;
use crate::record::OutboxRecord;

/// What an answer may take when the dispatcher ends.
pub(crate) const ENDING: Duration = Duration::from_millis(300);
/// Threads left behind in the database. At the cap nothing more is asked until one
/// of them comes back.
const MOST: usize = 16;

/// How long a session may take for an answer: the server ends a statement before
/// that, so that only silence is met with leaving. Short enough that a lease is
/// renewed by the next pair.
pub(crate) fn deadline(lease: Duration) -> Duration {
    (lease / 3).clamp(Duration::from_secs(3), Duration::from_secs(12))
}

/// What the guards of one dispatcher share.
pub(crate) struct Guards {
    backend: Arc<dyn Backend>,
    deadline: Duration,
    closed: Receiver<()>,
    left: AtomicUsize,
    /// The same number, for [`Stats`](super::Stats).
    counted: Arc<AtomicU64>,
}

impl Guards {
    pub(crate) fn new(
        backend: Arc<dyn Backend>,
        deadline: Duration,
        closed: Receiver<()>,
        counted: Arc<AtomicU64>,
    ) -> Self {
        Self {
            backend,
            deadline,
            closed,
            left: AtomicUsize::new(0),
            counted,
        }
    }

    pub(crate) fn backend(&self) -> Arc<dyn Backend> {
        Arc::clone(&self.backend)
    }

    pub(crate) fn is_full(&self) -> bool {
        self.left.load(Ordering::Acquire) >= MOST
    }

    /// A thread is left behind; [`came_back`](Self::came_back) is its last word.
    pub(crate) fn left_behind(&self) {
        self.left.fetch_add(1, Ordering::AcqRel);
        add(&self.counted, 1);
        tracing::warn!(
            deadline = ?self.deadline,
            "the database did not answer in time; a thread is left behind in it"
        );
    }

    pub(crate) fn came_back(&self) {
        self.left.fetch_sub(1, Ordering::AcqRel);
        subtract(&self.counted, 1);
    }
}

type Job = Box<dyn FnOnce(&mut dyn Session) + Send>;

/// A thread with a session.
struct Pair {
    jobs: Sender<Job>,
    /// Set when nobody waits for it any more.
    left: Arc<AtomicBool>,
    /// Disconnected when the thread has ended.
    ended: Receiver<()>,
}

/// See the module.
pub(crate) struct Guarded {
    guards: Arc<Guards>,
    role: &'static str,
    pair: Option<Pair>,
}

impl Guarded {
    pub(crate) const fn new(guards: Arc<Guards>, role: &'static str) -> Self {
        Self {
            guards,
            role,
            pair: None,
        }
    }

    fn pair(&mut self) -> Result<&Pair, StoreError> {
        match self.pair {
            Some(ref pair) => Ok(pair),
            None => {
                let pair = self.start()?;
                Ok(self.pair.insert(pair))
            }
        }
    }

    fn start(&self) -> Result<Pair, StoreError> {
        if self.guards.is_full() {
            return Err(StoreError::Unavailable);
        }
        let (jobs, work) = bounded::<Job>(1);
        let (ending, ended) = bounded(0);
        let left = Arc::new(AtomicBool::new(false));
        let (guards, role, was_left) = (Arc::clone(&self.guards), self.role, Arc::clone(&left));
        std::thread::Builder::new()
            .name(format!("outbox-{role}-db"))
            .spawn(move || {
                let _ending: Sender<()> = ending;
                let mut session = guards.backend.session(role);
                for job in work {
                    job(session.as_mut());
                }
                drop(session);
                if was_left.load(Ordering::Acquire) {
                    guards.came_back();
                }
            })
            .map_err(|_| StoreError::Unavailable)?;
        Ok(Pair { jobs, left, ended })
    }

    fn ask<T: Send + 'static>(
        &mut self,
        question: impl FnOnce(&mut dyn Session) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let until = Instant::now() + self.guards.deadline;
        let (reply, replies) = bounded(1);
        let job: Job = Box::new(move |session| {
            // Nobody may wait for it any more.
            let _ = reply.send(question(session));
        });
        if self.pair()?.jobs.send(job).is_err() {
            self.pair = None;
            return Err(StoreError::Unavailable);
        }
        let reply = select! {
            recv(replies) -> reply => reply.ok(),
            recv(self.guards.closed) -> _ => {
                replies.recv_deadline(until.min(Instant::now() + ENDING)).ok()
            }
            default(until.saturating_duration_since(Instant::now())) => None,
        };
        if let Some(result) = reply {
            return result;
        }
        self.leave();
        // Whatever was asked for may come about yet.
        Err(StoreError::Timeout)
    }

    fn leave(&mut self) {
        if let Some(pair) = self.pair.take() {
            self.guards.left_behind();
            pair.left.store(true, Ordering::Release);
        }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        if let Some(Pair { jobs, ended, .. }) = self.pair.take() {
            drop(jobs);
            // It says good-bye to the server.
            let _ = ended.recv_timeout(ENDING);
        }
    }
}

impl Session for Guarded {
    fn due(&mut self, destinations: &[String]) -> Result<Due, StoreError> {
        let destinations = destinations.to_vec();
        self.ask(move |session| session.due(&destinations))
    }

    fn claim(&mut self, claim: &Claim) -> Result<Claimed, StoreError> {
        let claim = claim.clone();
        self.ask(move |session| session.claim(&claim))
    }

    fn claim_keyed(&mut self, claim: &Claim, cursor: &str) -> Result<KeyedClaim, StoreError> {
        let (claim, cursor) = (claim.clone(), cursor.to_owned());
        self.ask(move |session| session.claim_keyed(&claim, &cursor))
    }

    fn held(&mut self, worker_id: &str) -> Result<Vec<Fence>, StoreError> {
        let worker_id = worker_id.to_owned();
        self.ask(move |session| session.held(&worker_id))
    }

    fn settle(
        &mut self,
        worker_id: &str,
        settlements: &[Settlement],
    ) -> Result<Vec<Verdict>, StoreError> {
        let (worker_id, settlements) = (worker_id.to_owned(), settlements.to_vec());
        self.ask(move |session| session.settle(&worker_id, &settlements))
    }

    fn renew(
        &mut self,
        worker_id: &str,
        fences: &[Fence],
        lease: Duration,
    ) -> Result<Vec<i64>, StoreError> {
        let (worker_id, fences) = (worker_id.to_owned(), fences.to_vec());
        self.ask(move |session| session.renew(&worker_id, &fences, lease))
    }

    fn lapse(
        &mut self,
        destinations: &[String],
        foreign_lease: Duration,
        limit: i64,
    ) -> Result<usize, StoreError> {
        let destinations = destinations.to_vec();
        self.ask(move |session| session.lapse(&destinations, foreign_lease, limit))
    }

    fn with_unknown(&mut self, destinations: &[String]) -> Result<Vec<String>, StoreError> {
        let destinations = destinations.to_vec();
        self.ask(move |session| session.with_unknown(&destinations))
    }

    fn claim_probes(
        &mut self,
        probe: &Probe,
    ) -> Result<Vec<(ProbeFence, OutboxRecord)>, StoreError> {
        let probe = probe.clone();
        self.ask(move |session| session.claim_probes(&probe))
    }

    fn resend_ripe(&mut self, probe: &Probe) -> Result<usize, StoreError> {
        let probe = probe.clone();
        self.ask(move |session| session.resend_ripe(&probe))
    }

    fn answer(&mut self, fence: ProbeFence, answer: &Answer) -> Result<bool, StoreError> {
        let answer = answer.clone();
        self.ask(move |session| session.answer(fence, &answer))
    }
}

#[cfg(test)]
mod tests {
    use crossbeam_channel::never;

    use super::super::bell::Ear;
    use super::*;
    use crate::memory::MemoryOutbox;

    /// A store whose sessions hang in `due` until the gate is closed.
    struct Hanging {
        gate: Receiver<()>,
    }

    struct HangingSession {
        gate: Receiver<()>,
        inner: Box<dyn Session>,
    }

    impl Backend for Hanging {
        fn session(&self, role: &'static str) -> Box<dyn Session> {
            Box::new(HangingSession {
                gate: self.gate.clone(),
                inner: MemoryOutbox::new().backend().session(role),
            })
        }

        fn listen(&self, _ear: &Ear) {}
    }

    /// Only `due` hangs; nothing else is asked here.
    impl Session for HangingSession {
        fn due(&mut self, destinations: &[String]) -> Result<Due, StoreError> {
            let _ = self.gate.recv();
            self.inner.due(destinations)
        }

        fn claim(&mut self, claim: &Claim) -> Result<Claimed, StoreError> {
            self.inner.claim(claim)
        }

        fn claim_keyed(&mut self, claim: &Claim, cursor: &str) -> Result<KeyedClaim, StoreError> {
            self.inner.claim_keyed(claim, cursor)
        }

        fn held(&mut self, worker_id: &str) -> Result<Vec<Fence>, StoreError> {
            self.inner.held(worker_id)
        }

        fn settle(
            &mut self,
            worker_id: &str,
            settlements: &[Settlement],
        ) -> Result<Vec<Verdict>, StoreError> {
            self.inner.settle(worker_id, settlements)
        }

        fn renew(
            &mut self,
            worker_id: &str,
            fences: &[Fence],
            lease: Duration,
        ) -> Result<Vec<i64>, StoreError> {
            self.inner.renew(worker_id, fences, lease)
        }

        fn lapse(
            &mut self,
            destinations: &[String],
            foreign_lease: Duration,
            limit: i64,
        ) -> Result<usize, StoreError> {
            self.inner.lapse(destinations, foreign_lease, limit)
        }

        fn with_unknown(&mut self, destinations: &[String]) -> Result<Vec<String>, StoreError> {
            self.inner.with_unknown(destinations)
        }

        fn claim_probes(
            &mut self,
            probe: &Probe,
        ) -> Result<Vec<(ProbeFence, OutboxRecord)>, StoreError> {
            self.inner.claim_probes(probe)
        }

        fn resend_ripe(&mut self, probe: &Probe) -> Result<usize, StoreError> {
            self.inner.resend_ripe(probe)
        }

        fn answer(&mut self, fence: ProbeFence, answer: &Answer) -> Result<bool, StoreError> {
            self.inner.answer(fence, answer)
        }
    }

    fn guards(deadline: Duration, closed: Receiver<()>) -> (Arc<Guards>, Sender<()>) {
        let (open, gate) = bounded(0);
        let backend = Arc::new(Hanging { gate });
        let guards = Guards::new(backend, deadline, closed, Arc::default());
        (Arc::new(guards), open)
    }

    #[test]
    fn threads_left_behind_are_capped_and_come_back() {
        let (guards, gate) = guards(Duration::from_millis(5), never());
        let mut session = Guarded::new(Arc::clone(&guards), "test");
        for _ in 0..MOST {
            assert_eq!(session.due(&[]).err(), Some(StoreError::Timeout));
        }
        assert_eq!(guards.counted.load(Ordering::Relaxed), MOST as u64);
        // At the cap nobody waits, and no thread is made.
        assert_eq!(session.due(&[]).err(), Some(StoreError::Unavailable));
        assert_eq!(guards.counted.load(Ordering::Relaxed), MOST as u64);
        drop(gate);
        let end = Instant::now() + Duration::from_secs(10);
        while guards.counted.load(Ordering::Relaxed) > 0 {
            assert!(Instant::now() < end, "they did not come back");
            std::thread::yield_now();
        }
        assert!(session.due(&[]).is_ok());
    }

    #[test]
    fn an_end_cuts_the_wait_short() {
        let (close, closed) = bounded(0);
        let (guards, _gate) = guards(Duration::from_secs(60), closed);
        let mut session = Guarded::new(guards, "test");
        let begun = Instant::now();
        drop(close);
        assert_eq!(session.due(&[]).err(), Some(StoreError::Timeout));
        assert!(begun.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn the_deadline_lets_a_lease_be_renewed_by_the_next_pair() {
        let of = |seconds| deadline(Duration::from_secs(seconds)).as_secs();
        assert_eq!(
            [of(1), of(9), of(30), of(60), of(86_400)],
            [3, 3, 10, 12, 12]
        );
    }
}
