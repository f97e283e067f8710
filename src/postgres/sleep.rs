//! Going to sleep without missing a row, and without a NOTIFY at every commit,
//! which would make commits queue.
//!
//! Two advisory locks of the database carry it. [`SLEEP`] is held by a dispatcher
//! that wants to sleep: the trigger notifies only if it finds it held. [`QUIET`] is
//! held, shared and to the end of the transaction, by whoever has inserted and not
//! notified. An enqueuer takes `QUIET` and then looks at `SLEEP`; we take `SLEEP`
//! and then look at `QUIET`. So whoever did not notify us is seen by us, and its
//! rows by the look that follows, for a commit is visible before its locks go.
//!
//! ```text
//! awake ── a look found nothing ──► SLEEP taken, look ──► QUIET is free, look ──► asleep
//!   ▲                                        ▲   │ somebody holds it
//!   │                                        └───┘ (20 ms, doubling to 250)
//!   └─── a look found something; or woken for nothing, and then not again for 200 ms
//! ```

use std::time::{Duration, Instant};

use crate::dispatcher::bell::{Ear, UNHEARD};
use crate::error::StoreError;

/// The class of the two locks.
pub(super) const CLASS: i32 = 7311;
/// "A dispatcher wants to sleep."
pub(super) const SLEEP: i32 = 1;
/// "Inserted, and not notified."
pub(super) const QUIET: i32 = 2;

/// The wait for an open transaction that will not notify: at first …
const OPEN: Duration = Duration::from_millis(20);
/// … and at last.
const OPEN_LONGEST: Duration = Duration::from_millis(250);
/// Woken for nothing: another dispatcher is taking the rows. It is not to pay for
/// notifying us, so we look this often …
const BESIDE: Duration = Duration::from_millis(25);
/// … for this long.
const BESIDE_FOR: Duration = Duration::from_millis(200);
/// One dispatcher sleeps; the others look this often …
const SECOND: Duration = Duration::from_millis(500);
/// … and try this often to be the one.
const SECOND_TRIES: Duration = Duration::from_secs(1);

/// What is asked of the listening connection.
pub(super) trait Locks {
    /// Takes `SLEEP` unless another has it.
    fn take_sleep(&mut self) -> Result<bool, StoreError>;
    fn leave_sleep(&mut self) -> Result<(), StoreError>;
    /// Whether nobody holds `QUIET`.
    fn all_have_notified(&mut self) -> Result<bool, StoreError>;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// `SLEEP` is not held, nor tried before `not_before`.
    Awake {
        not_before: Instant,
    },
    /// `SLEEP` is held, and this look is awaited.
    Armed {
        look: u64,
        wait: Duration,
    },
    /// Somebody holds `QUIET`: to be tried again.
    Contended {
        until: Instant,
        wait: Duration,
    },
    /// `QUIET` was free, and the last look is awaited.
    Last {
        look: u64,
    },
    Asleep,
}

/// See the module.
pub(super) struct Sleeper {
    state: State,
    /// The look that a notification made us ask for.
    woken: Option<u64>,
    /// How many looks had found something when we last saw.
    fruitful: u64,
}

impl Sleeper {
    /// For a connection that listens and holds nothing.
    pub(super) fn new(ear: &Ear, now: Instant) -> Self {
        ear.allow_rest(UNHEARD);
        Self {
            state: State::Awake { not_before: now },
            woken: None,
            fruitful: ear.fruitful(),
        }
    }

    /// One step, to be made when the claimer has told something, when a
    /// notification came (`heard`), and now and then.
    pub(super) fn step(
        &mut self,
        heard: Heard,
        now: Instant,
        ear: &Ear,
        locks: &mut dyn Locks,
    ) -> Result<(), StoreError> {
        if heard == Heard::Notification {
            self.woken = Some(ear.ask());
        }
        let fruitful = ear.fruitful();
        if std::mem::replace(&mut self.fruitful, fruitful) != fruitful {
            self.woken = None;
            return self.wake(now, UNHEARD, ear, locks);
        }
        if self.woken.is_some_and(|look| ear.fruitless(look)) {
            self.woken = None;
            return self.wake(now + BESIDE_FOR, BESIDE, ear, locks);
        }
        self.state = match self.state {
            State::Awake { not_before } if not_before <= now && ear.is_idle() => {
                if locks.take_sleep()? {
                    State::Armed {
                        look: ear.ask(),
                        wait: OPEN,
                    }
                } else {
                    ear.allow_rest(SECOND);
                    State::Awake {
                        not_before: now + SECOND_TRIES,
                    }
                }
            }
            State::Armed { look, wait } if ear.fruitless(look) => {
                if locks.all_have_notified()? {
                    State::Last { look: ear.ask() }
                } else {
                    State::Contended {
                        until: now + wait,
                        wait: (wait * 2).min(OPEN_LONGEST),
                    }
                }
            }
            State::Contended { until, wait } if until <= now => State::Armed {
                look: ear.ask(),
                wait,
            },
            State::Last { look } if ear.fruitless(look) => {
                ear.allow_rest(Duration::MAX);
                State::Asleep
            }
            state => state,
        };
        Ok(())
    }

    /// How soon a step is due even if nothing is heard.
    pub(super) fn due(&self, now: Instant) -> Option<Duration> {
        match self.state {
            State::Awake { not_before: at } | State::Contended { until: at, .. } => {
                Some(at.saturating_duration_since(now)).filter(|wait| !wait.is_zero())
            }
            State::Armed { .. } | State::Last { .. } | State::Asleep => None,
        }
    }

    fn wake(
        &mut self,
        not_before: Instant,
        rest: Duration,
        ear: &Ear,
        locks: &mut dyn Locks,
    ) -> Result<(), StoreError> {
        ear.allow_rest(rest);
        if !matches!(self.state, State::Awake { .. }) {
            locks.leave_sleep()?;
        }
        if rest == BESIDE {
            // It may be resting for longer.
            ear.ring();
        }
        self.state = State::Awake { not_before };
        Ok(())
    }
}

/// Whether a notification came since the last step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Heard {
    Nothing,
    Notification,
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crossbeam_channel::{Receiver, bounded};

    use super::*;
    use crate::dispatcher::bell::{Bell, Found};

    /// The two locks as the server has them, and what was asked of it.
    #[derive(Default)]
    struct Server {
        sleep_is_anothers: bool,
        open_transactions: bool,
        held: bool,
        asked: usize,
    }

    impl Locks for Server {
        fn take_sleep(&mut self) -> Result<bool, StoreError> {
            self.asked += 1;
            self.held = !self.sleep_is_anothers;
            Ok(self.held)
        }

        fn leave_sleep(&mut self) -> Result<(), StoreError> {
            assert!(self.held, "it was not held");
            self.held = false;
            Ok(())
        }

        fn all_have_notified(&mut self) -> Result<bool, StoreError> {
            assert!(self.held, "asked out of order");
            Ok(!self.open_transactions)
        }
    }

    /// A dispatcher whose claimer is this test.
    struct Dispatcher {
        bell: Arc<Bell>,
        ear: Ear,
        server: Server,
        sleeper: Sleeper,
        now: Instant,
        _ends: (Receiver<()>, crossbeam_channel::Sender<()>),
    }

    impl Dispatcher {
        fn new() -> Self {
            let (wake, woken) = bounded(1);
            let (close, closed) = bounded(0);
            let bell = Arc::new(Bell::new(wake, closed));
            let ear = bell.ear();
            let now = Instant::now();
            Self {
                sleeper: Sleeper::new(&ear, now),
                bell,
                ear,
                server: Server::default(),
                now,
                _ends: (woken, close),
            }
        }

        fn step(&mut self, heard: Heard) {
            self.sleeper
                .step(heard, self.now, &self.ear, &mut self.server)
                .unwrap();
        }

        /// A look of the claimer, from its beginning to its end.
        fn look(&self, found: Found) {
            self.bell.looked(self.bell.ticket(), found);
        }

        /// Looks that find nothing, until it sleeps or is where it stays.
        fn settle(&mut self) {
            for _ in 0..5 {
                self.look(Found::Nothing);
                self.step(Heard::Nothing);
            }
        }

        fn rest(&self) -> Duration {
            self.ear.hears();
            self.bell.rest()
        }

        fn is_asleep(&self) -> bool {
            self.rest() > Duration::from_secs(3600)
        }
    }

    #[test]
    fn it_sleeps_only_after_a_look_that_began_with_each_lock() {
        let mut dispatcher = Dispatcher::new();
        dispatcher.look(Found::Nothing);
        dispatcher.step(Heard::Nothing);
        assert!(dispatcher.server.held);
        // Without a look since, nothing follows, however often it is asked.
        dispatcher.step(Heard::Nothing);
        dispatcher.step(Heard::Nothing);
        assert!(!dispatcher.is_asleep());
        dispatcher.look(Found::Nothing);
        dispatcher.step(Heard::Nothing);
        assert!(!dispatcher.is_asleep(), "the last look is owing");
        dispatcher.look(Found::Nothing);
        dispatcher.step(Heard::Nothing);
        assert!(dispatcher.is_asleep());
    }

    #[test]
    fn a_look_that_began_before_the_lock_does_not_count() {
        let mut dispatcher = Dispatcher::new();
        dispatcher.look(Found::Nothing);
        let early = dispatcher.bell.ticket();
        dispatcher.step(Heard::Nothing);
        dispatcher.bell.looked(early, Found::Nothing);
        dispatcher.step(Heard::Nothing);
        dispatcher.bell.looked(early, Found::Nothing);
        dispatcher.step(Heard::Nothing);
        assert!(!dispatcher.is_asleep());
    }

    #[test]
    fn it_waits_for_transactions_that_will_not_notify() {
        let mut dispatcher = Dispatcher::new();
        dispatcher.server.open_transactions = true;
        dispatcher.settle();
        assert!(!dispatcher.is_asleep());
        let mut waited = Duration::ZERO;
        for _ in 0..6 {
            let wait = dispatcher.sleeper.due(dispatcher.now).unwrap();
            assert!(wait > waited || wait == OPEN_LONGEST, "{wait:?}");
            waited = wait;
            dispatcher.now += wait;
            dispatcher.step(Heard::Nothing);
            dispatcher.settle();
        }
        assert_eq!(waited, OPEN_LONGEST);
        dispatcher.server.open_transactions = false;
        dispatcher.now += OPEN_LONGEST;
        dispatcher.step(Heard::Nothing);
        dispatcher.settle();
        assert!(dispatcher.is_asleep());
    }

    #[test]
    fn a_busy_dispatcher_holds_no_lock() {
        let mut dispatcher = Dispatcher::new();
        dispatcher.settle();
        assert!(dispatcher.server.held);
        dispatcher.look(Found::Something);
        dispatcher.step(Heard::Nothing);
        assert!(!dispatcher.server.held);
        assert_eq!(dispatcher.rest(), UNHEARD);
    }

    #[test]
    fn one_that_is_woken_for_nothing_leaves_the_lock_for_a_while() {
        let mut dispatcher = Dispatcher::new();
        dispatcher.settle();
        dispatcher.step(Heard::Notification);
        // A look that finds nothing, and that began after it was woken.
        dispatcher.look(Found::Nothing);
        dispatcher.step(Heard::Nothing);
        assert!(!dispatcher.server.held);
        assert_eq!(dispatcher.rest(), BESIDE);
        let asked = dispatcher.server.asked;
        dispatcher.now += BESIDE_FOR / 2;
        dispatcher.settle();
        assert_eq!(dispatcher.server.asked, asked);
        dispatcher.now += BESIDE_FOR;
        dispatcher.settle();
        assert!(dispatcher.is_asleep());
    }

    #[test]
    fn beside_one_that_sleeps_another_looks_now_and_then() {
        let mut dispatcher = Dispatcher::new();
        dispatcher.server.sleep_is_anothers = true;
        dispatcher.settle();
        assert_eq!((dispatcher.rest(), dispatcher.server.asked), (SECOND, 1));
        dispatcher.server.sleep_is_anothers = false;
        dispatcher.now += SECOND_TRIES;
        dispatcher.settle();
        assert!(dispatcher.is_asleep());
    }

    #[test]
    fn a_listener_that_was_replaced_has_no_say() {
        let mut dispatcher = Dispatcher::new();
        let next = dispatcher.bell.ear();
        dispatcher.settle();
        assert!(!dispatcher.is_asleep());
        assert!(dispatcher.ear.pause(Duration::ZERO).is_err());
        assert!(next.pause(Duration::ZERO).is_ok());
    }
}
