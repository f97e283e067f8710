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
