//! The circuit breaker of a destination: a remote that fails again and again is
//! left alone for a while, and then tried with one call.
//!
//! ```text
//! closed ── `failures` in a row ──► open ── `open_for` is over ──► half-open: one call
//!   ▲                                ▲                                  │    │
//!   │                                └────────────── it fails ──────────┘    │
//!   └──────────────────────────────── it is answered ────────────────────────┘
//! ```

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::time::after;

/// When a breaker opens, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BreakerPolicy {
    /// Calls that failed without one between them that was answered.
    pub(crate) failures: u32,
    pub(crate) open_for: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Closed {
        failed: u32,
    },
    Open {
        until: Instant,
    },
    /// The one call has not begun yet, or runs.
    HalfOpen {
        calling: bool,
    },
}

/// What a breaker lets through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Passage {
    All,
    One,
    /// Nothing, for this long, or until the one call has ended.
    None(Option<Duration>),
}

/// What an answer did to the breaker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    Opened,
    Closed,
    Unchanged,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Breaker {
    policy: BreakerPolicy,
    state: Mutex<State>,
}

impl Breaker {
    pub(crate) const fn new(policy: BreakerPolicy) -> Self {
        Self {
            policy,
            state: Mutex::new(State::Closed { failed: 0 }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A state is one value: no panic leaves half of it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What may be claimed.
    pub(crate) fn passage(&self, now: Instant) -> Passage {
        match *self.lock() {
            State::Closed { .. } => Passage::All,
            State::Open { until } if until > now => Passage::None(Some(until - now)),
            State::Open { .. } | State::HalfOpen { calling: false } => Passage::One,
            State::HalfOpen { calling: true } => Passage::None(None),
        }
    }

    /// A call is about to begin. `false`: it must not.
    pub(crate) fn admit(&self, now: Instant) -> bool {
        let mut state = self.lock();
        match *state {
            State::Closed { .. } => true,
            State::Open { until } if until > now => false,
            State::HalfOpen { calling: true } => false,
            State::Open { .. } | State::HalfOpen { calling: false } => {
                *state = State::HalfOpen { calling: true };
                true
            }
        }
    }

    /// A call ended: the remote answered it, be it with a refusal, or failed to.
    pub(crate) fn record(&self, answered: bool, now: Instant) -> Turn {
        let mut state = self.lock();
        let open = State::Open {
            until: after(now, self.policy.open_for),
        };
        match (*state, answered) {
            (State::Closed { .. }, true) => *state = State::Closed { failed: 0 },
            (State::Closed { failed }, false) if failed + 1 < self.policy.failures => {
                *state = State::Closed { failed: failed + 1 };
            }
            (State::Closed { .. } | State::HalfOpen { calling: true }, false) => {
                *state = open;
                return Turn::Opened;
            }
            (State::HalfOpen { calling: true }, true) => {
                *state = State::Closed { failed: 0 };
                return Turn::Closed;
            }
            // It began before the breaker opened, and says nothing new.
            (State::Open { .. } | State::HalfOpen { calling: false }, _) => {}
        }
        Turn::Unchanged
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPEN_FOR: Duration = Duration::from_secs(30);

    fn breaker() -> Breaker {
        Breaker::new(BreakerPolicy {
            failures: 3,
            open_for: OPEN_FOR,
        })
    }

    #[test]
    fn it_opens_after_failures_in_a_row_and_not_before() {
        let (breaker, now) = (breaker(), Instant::now());
        for answered in [false, false, true, false, false] {
            assert_eq!(breaker.record(answered, now), Turn::Unchanged);
            assert_eq!(breaker.passage(now), Passage::All);
        }
        assert_eq!(breaker.record(false, now), Turn::Opened);
        assert_eq!(breaker.passage(now), Passage::None(Some(OPEN_FOR)));
        assert!(!breaker.admit(now));
    }

    #[test]
    fn half_open_it_lets_one_through_and_goes_by_its_answer() {
        let (breaker, now) = (breaker(), Instant::now());
        for _ in 0..3 {
            breaker.record(false, now);
        }
        let later = now + OPEN_FOR;
        assert_eq!(breaker.passage(later), Passage::One);
        assert!(breaker.admit(later));
        assert_eq!(breaker.passage(later), Passage::None(None));
        assert!(!breaker.admit(later));
        assert_eq!(breaker.record(false, later), Turn::Opened);
        assert!(!breaker.admit(later));

        let later = later + OPEN_FOR;
        assert!(breaker.admit(later));
        assert_eq!(breaker.record(true, later), Turn::Closed);
        assert_eq!(breaker.passage(later), Passage::All);
        assert!(breaker.admit(later));
    }

    #[test]
    fn an_answer_from_before_it_opened_changes_nothing() {
        let (breaker, now) = (breaker(), Instant::now());
        for _ in 0..3 {
            breaker.record(false, now);
        }
        assert_eq!(breaker.record(true, now), Turn::Unchanged);
        assert_eq!(breaker.record(false, now + OPEN_FOR / 2), Turn::Unchanged);
        assert_eq!(breaker.passage(now + OPEN_FOR), Passage::One);
    }
}
