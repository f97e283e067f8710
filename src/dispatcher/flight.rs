//! The claims that this process holds, and how far each one is.

use std::collections::{HashMap, HashSet};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::backend::Fence;
use super::time::{after, from_now};

/// How far a claimed row is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Claimed, waiting for a worker.
    Waiting,
    /// Its call runs, until this instant at most.
    Calling(Instant),
    /// Its outcome is on its way to the store.
    Settling,
}

#[derive(Debug)]
struct Flight {
    fence: Fence,
    lane: usize,
    /// Whether later rows of an ordering key wait for it.
    keyed: bool,
    lease_until: Instant,
    step: Step,
}

/// Whether a worker may begin the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Begin {
    Go,
    /// The lease is over or about to be and could not be renewed.
    LeaseOver,
}

#[derive(Debug, Default)]
struct Inner {
    flights: HashMap<i64, Flight>,
    /// Calls that timed out and still run, by row, with the instant until which
    /// nobody is asked about the row.
    overdue: HashMap<Uuid, Instant>,
    /// Rows that a reconciler is asked about.
    questions: HashMap<Uuid, Question>,
    /// Claims that were let go with their outcome unwritten, after their call had
    /// begun: the store may hold them yet.
    let_go: HashSet<i64>,
}

#[derive(Debug)]
struct Question {
    lane: usize,
    asking: Asking,
}

/// How far a question is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asking {
    /// The reconciler has until this instant.
    Until(Instant),
    /// Its answer is on its way to the store.
    Answered,
    /// It did not answer in time and still runs.
    LeftBehind,
}

impl Inner {
    /// Questions that hold a place among the reconcilers of a lane, or of all.
    fn in_question(&self, lane: Option<usize>) -> usize {
        let questions = self.questions.values();
        questions
            .filter(|q| q.asking != Asking::LeftBehind && lane.is_none_or(|lane| lane == q.lane))
            .count()
    }
}

/// All claims in hand.
#[derive(Debug, Default)]
pub(crate) struct Flights {
    inner: Mutex<Inner>,
    changed: Condvar,
}

impl Flights {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing in here panics half-way; a poisoned lock is as good as new.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(
        &self,
        lane: usize,
        lease_until: Instant,
        fences: impl Iterator<Item = (Fence, bool)>,
    ) {
        let mut inner = self.lock();
        for (fence, keyed) in fences {
            inner.flights.insert(
                fence.seq,
                Flight {
                    fence,
                    lane,
                    keyed,
                    lease_until,
                    step: Step::Waiting,
                },
            );
        }
    }

    /// A worker is about to call. It needs half of the lease; if less is left it
    /// waits for the renewal, at most until the lease is over.
    pub(crate) fn begin(&self, fence: Fence, lease: Duration, timeout: Duration) -> Begin {
        let mut inner = self.lock();
        loop {
            let now = Instant::now();
            let Some(flight) = inner.flights.get_mut(&fence.seq) else {
                return Begin::LeaseOver;
            };
            let left = flight.lease_until.saturating_duration_since(now);
            if left >= lease / 2 {
                flight.step = Step::Calling(after(now, timeout));
                return Begin::Go;
            }
            if left.is_zero() {
                return Begin::LeaseOver;
            }
            inner = self
                .changed
                .wait_timeout(inner, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// The call is over. `false`: it had been given up before; the thread is one
    /// of those that were left behind.
    pub(crate) fn answered(&self, fence: Fence) -> bool {
        let mut inner = self.lock();
        match inner.flights.get_mut(&fence.seq) {
            Some(flight) if matches!(flight.step, Step::Calling(_)) => {
                flight.step = Step::Settling;
                true
            }
            _ => {
                inner.overdue.remove(&fence.outbox_id);
                false
            }
        }
    }

    /// The row is settled without a call.
    pub(crate) fn settling(&self, fence: Fence) {
        if let Some(flight) = self.lock().flights.get_mut(&fence.seq) {
            flight.step = Step::Settling;
        }
    }

    /// Gives up calls whose time is over at `now` (or all of them, if `None`);
    /// nobody is to be asked about their rows for `quiet(lane)`.
    pub(crate) fn give_up(
        &self,
        now: Option<Instant>,
        quiet: impl Fn(usize) -> Duration,
    ) -> Vec<(usize, Fence)> {
        let mut guard = self.lock();
        let inner = &mut *guard;
        let mut given = Vec::new();
        for flight in inner.flights.values_mut() {
            if let Step::Calling(deadline) = flight.step
                && now.is_none_or(|now| deadline <= now)
            {
                flight.step = Step::Settling;
                inner
                    .overdue
                    .insert(flight.fence.outbox_id, from_now(quiet(flight.lane)));
                given.push((flight.lane, flight.fence));
            }
        }
        given
    }

    /// The outcome is committed, or lost. Returns whether the row had an ordering
    /// key.
    pub(crate) fn done(&self, fence: Fence) -> bool {
        let flight = self.lock().flights.remove(&fence.seq);
        self.changed.notify_all();
        flight.is_some_and(|flight| flight.keyed)
    }

    /// Whether the lease of a claim is over as far as we know.
    pub(crate) fn lease_over(&self, fence: Fence) -> bool {
        self.lock()
            .flights
            .get(&fence.seq)
            .is_none_or(|flight| flight.lease_until <= Instant::now())
    }

    /// Claims that are ours to deal with: those in hand, and those that were let go.
    pub(crate) fn known(&self) -> HashSet<i64> {
        let inner = self.lock();
        let held = inner.flights.keys().chain(&inner.let_go);
        held.copied().collect()
    }

    /// A claim ends here with its outcome unwritten, and its call has begun.
    pub(crate) fn let_go(&self, fence: Fence) {
        self.lock().let_go.insert(fence.seq);
    }

    /// Claims that were let go and are not among `held` are over for good.
    pub(crate) fn forget_let_go(&self, held: &[Fence]) {
        let held: HashSet<i64> = held.iter().map(|fence| fence.seq).collect();
        self.lock().let_go.retain(|seq| held.contains(seq));
    }

    /// What is to be renewed.
    pub(crate) fn fences(&self) -> Vec<Fence> {
        self.lock().flights.values().map(|f| f.fence).collect()
    }

    pub(crate) fn renewed(&self, seqs: &[i64], until: Instant) {
        let mut inner = self.lock();
        for seq in seqs {
            if let Some(flight) = inner.flights.get_mut(seq) {
                flight.lease_until = until;
            }
        }
        drop(inner);
        self.changed.notify_all();
    }

    /// Rows that nobody is to be asked about now: their call still runs, or they
    /// are in question already.
    pub(crate) fn quiet(&self) -> Vec<Uuid> {
        let mut inner = self.lock();
        let now = Instant::now();
        inner.overdue.retain(|_, until| *until > now);
        let rows = inner.overdue.keys().chain(inner.questions.keys());
        rows.copied().collect()
    }

    /// A reconciler is to be asked about a row, and has until then.
    pub(crate) fn ask(&self, lane: usize, outbox_id: Uuid, until: Instant) {
        let question = Question {
            lane,
            asking: Asking::Until(until),
        };
        self.lock().questions.insert(outbox_id, question);
    }

    /// It has answered. `false`: it had been given up before; the thread is one
    /// of those that were left behind.
    pub(crate) fn question_answered(&self, outbox_id: Uuid) -> bool {
        match self.lock().questions.get_mut(&outbox_id) {
            Some(question) if matches!(question.asking, Asking::Until(_)) => {
                question.asking = Asking::Answered;
                true
            }
            _ => false,
        }
    }

    /// The answer is committed, or forgotten.
    pub(crate) fn question_done(&self, outbox_id: Uuid) {
        self.lock().questions.remove(&outbox_id);
        self.changed.notify_all();
    }

    /// Gives up questions whose time is over at `now` (or all of them, if `None`);
    /// returns their lanes. Their rows stay quiet: asked again they would take
    /// another thread each time.
    pub(crate) fn give_up_questions(&self, now: Option<Instant>) -> Vec<usize> {
        let mut inner = self.lock();
        let mut given = Vec::new();
        for question in inner.questions.values_mut() {
            if let Asking::Until(until) = question.asking
                && now.is_none_or(|now| until <= now)
            {
                question.asking = Asking::LeftBehind;
                given.push(question.lane);
            }
        }
        given
    }

    /// How many rows of a lane are in question.
    pub(crate) fn in_question(&self, lane: usize) -> usize {
        self.lock().in_question(Some(lane))
    }

    pub(crate) fn len(&self) -> usize {
        self.lock().flights.len()
    }

    /// Waits until nothing is in hand and nobody is being asked; `false` at the
    /// deadline.
    pub(crate) fn wait_empty(&self, deadline: Instant) -> bool {
        self.wait_while(deadline, |inner| {
            inner.flights.len() + inner.in_question(None) > 0
        })
    }

    /// Waits until at most `n` claims are in hand; `false` at the deadline.
    pub(crate) fn wait_at_most(&self, n: usize, deadline: Instant) -> bool {
        self.wait_while(deadline, |inner| inner.flights.len() > n)
    }

    fn wait_while(&self, deadline: Instant, busy: impl Fn(&Inner) -> bool) -> bool {
        let mut inner = self.lock();
        while busy(&inner) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            inner = self
                .changed
                .wait_timeout(inner, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fence(seq: i64) -> Fence {
        Fence {
            outbox_id: Uuid::from_u128(seq.unsigned_abs().into()),
            seq,
            attempt: 1,
        }
    }

    const LEASE: Duration = Duration::from_secs(60);

    fn one_waiting(lease_left: Duration) -> Flights {
        let flights = Flights::default();
        flights.add(
            0,
            Instant::now() + lease_left,
            [(fence(1), false)].into_iter(),
        );
        flights
    }

    #[test]
    fn a_call_begins_only_with_half_of_its_lease_left() {
        assert_eq!(one_waiting(LEASE).begin(fence(1), LEASE, LEASE), Begin::Go);
        let short = one_waiting(Duration::from_millis(20));
        assert_eq!(short.begin(fence(1), LEASE, LEASE), Begin::LeaseOver);
        let renewed = one_waiting(Duration::from_secs(20));
        std::thread::scope(|scope| {
            let worker = scope.spawn(|| renewed.begin(fence(1), LEASE, LEASE));
            renewed.renewed(&[1], Instant::now() + LEASE);
            assert_eq!(worker.join().unwrap(), Begin::Go);
        });
    }

    #[test]
    fn of_a_timeout_and_an_answer_exactly_one_settles() {
        let flights = one_waiting(LEASE);
        assert_eq!(flights.begin(fence(1), LEASE, Duration::ZERO), Begin::Go);
        let quiet = |_| LEASE;
        assert_eq!(
            flights.give_up(Some(Instant::now()), quiet),
            [(0, fence(1))]
        );
        assert_eq!(flights.give_up(None, quiet), []);
        assert_eq!(flights.quiet(), [fence(1).outbox_id]);
        assert!(!flights.answered(fence(1)));
        assert_eq!(flights.quiet(), Vec::<Uuid>::new());

        let flights = one_waiting(LEASE);
        assert_eq!(flights.begin(fence(1), LEASE, LEASE), Begin::Go);
        assert!(flights.answered(fence(1)));
        assert_eq!(flights.give_up(None, quiet), []);
    }

    #[test]
    fn a_row_in_question_is_not_asked_about_again_even_when_it_is_given_up() {
        let flights = Flights::default();
        let row = Uuid::from_u128(1);
        flights.ask(0, row, Instant::now());
        assert_eq!((flights.in_question(0), flights.in_question(1)), (1, 0));
        assert_eq!(flights.give_up_questions(Some(Instant::now())), [0]);
        assert_eq!((flights.in_question(0), flights.quiet()), (0, vec![row]));
        assert!(!flights.question_answered(row));
        flights.question_done(row);
        assert_eq!(flights.quiet(), Vec::<Uuid>::new());

        flights.ask(0, row, Instant::now() + LEASE);
        assert!(flights.question_answered(row));
        assert_eq!(flights.give_up_questions(None), Vec::<usize>::new());
    }
}
