//! What time it is for an outbox in memory.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use crossbeam_channel::{Receiver, Sender, bounded, never};

use crate::dispatcher::knock;
use crate::entry::cut;

/// A clock that stands still until it is moved. Clones are one clock.
///
/// It is the time of a [`MemoryOutbox`](crate::MemoryOutbox), where PostgreSQL's
/// clock would be asked: due instants, backoff, leases, settle delays. What a
/// dispatcher measures by itself stays real: how long a call may take, how often it
/// looks after lapsed claims.
///
/// ```
/// use std::time::Duration;
/// use diesel_outbox::FakeClock;
///
/// let clock = FakeClock::at("2026-01-01T00:00:00Z".parse()?);
/// clock.advance(Duration::from_secs(3600));
/// assert_eq!(clock.now().to_rfc3339(), "2026-01-01T01:00:00+00:00");
/// # Ok::<(), chrono::ParseError>(())
/// ```
#[derive(Debug, Clone)]
pub struct FakeClock {
    shared: Arc<Mutex<Shared>>,
}

#[derive(Debug)]
struct Shared {
    now: DateTime<Utc>,
    /// Who wants to know when it is moved.
    listeners: Vec<Sender<()>>,
}

impl FakeClock {
    /// Standing at `instant`.
    #[must_use]
    pub fn at(instant: DateTime<Utc>) -> Self {
        Self {
            shared: Arc::new(Mutex::new(Shared {
                now: cut(instant),
                listeners: Vec::new(),
            })),
        }
    }

    fn with<T>(&self, work: impl FnOnce(&mut Shared) -> T) -> T {
        work(&mut self.shared.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What it shows.
    #[must_use]
    pub fn now(&self) -> DateTime<Utc> {
        self.with(|shared| shared.now)
    }

    /// Moves it forward. Dispatchers that wait for a row to fall due look again.
    pub fn advance(&self, by: Duration) {
        self.with(|shared| {
            shared.now = later(shared.now, by);
            shared.listeners.retain(knock);
        });
    }

    fn listen(&self, listener: Sender<()>) {
        self.with(|shared| shared.listeners.push(listener));
    }
}

/// The time of an outbox in memory.
#[derive(Debug, Clone)]
pub(crate) enum Clock {
    System,
    Fake(FakeClock),
}

impl Clock {
    pub(crate) fn now(&self) -> DateTime<Utc> {
        match self {
            Self::System => cut(Utc::now()),
            Self::Fake(clock) => clock.now(),
        }
    }

    /// Hears of it when the clock is moved by hand.
    pub(crate) fn moved(&self) -> Receiver<()> {
        match self {
            Self::System => never(),
            Self::Fake(clock) => {
                let (listener, moved) = bounded(1);
                clock.listen(listener);
                moved
            }
        }
    }
}

/// `by` after `instant`, at most a century.
pub(crate) fn later(instant: DateTime<Utc>, by: Duration) -> DateTime<Utc> {
    instant.checked_add_signed(delta(by)).unwrap_or(instant)
}

/// A length of time that instants can be moved by, at most a century.
pub(crate) fn delta(by: Duration) -> TimeDelta {
    let century = TimeDelta::days(100 * 366);
    TimeDelta::from_std(by).map_or(century, |by| by.min(century))
}
