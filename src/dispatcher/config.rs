//! The dispatcher's own settings.

use std::fmt;
use std::time::Duration;

use super::Dispatcher;
use super::destination::Destination;
use super::handle::DispatcherHandle;
use crate::memory::MemoryOutbox;

/// A setting makes no sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the setting {field} makes no sense")]
pub struct ConfigError {
    field: &'static str,
}

impl ConfigError {
    pub(crate) const fn new(field: &'static str) -> Self {
        Self { field }
    }

    /// The name of the setting.
    #[must_use]
    pub const fn field(&self) -> &'static str {
        self.field
    }
}

/// What a dispatcher's database URL leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Route {
    /// The server, or a proxy that gives a client one server connection for as
    /// long as it stays.
    #[default]
    Direct,
    /// A proxy that gives each transaction another server connection, such as
    /// PgBouncer in transaction mode. Nothing is then kept in a session: no LISTEN,
    /// no session lock, no prepared statement; due rows are found by polling only.
    TransactionPooler,
}

const LEASE_LEAST: Duration = Duration::from_millis(100);
const LEASE_MOST: Duration = Duration::from_secs(86_400);

/// Where the rows are.
#[derive(Clone)]
pub(crate) enum Target {
    Postgres { url: String, route: Route },
    Memory(MemoryOutbox),
}

/// Settings of a [`Dispatcher`], checked once, when it is built.
#[derive(Clone)]
#[must_use]
pub struct DispatcherBuilder {
    pub(crate) target: Target,
    pub(crate) destinations: Vec<Destination>,
    pub(crate) batch: usize,
    pub(crate) lease: Duration,
    pub(crate) poll: Duration,
    pub(crate) foreign_lease: Duration,
    pub(crate) maintenance: Duration,
}

impl DispatcherBuilder {
    pub(crate) fn new(target: Target) -> Self {
        Self {
            target,
            destinations: Vec::new(),
            batch: 500,
            lease: Duration::from_secs(60),
            poll: Duration::from_secs(1),
            foreign_lease: Duration::from_secs(300),
            maintenance: Duration::from_secs(5),
        }
    }

    /// Registers a remote system. Rows of destinations that are not registered
    /// are left alone. Two of one name are refused, and so is none at all.
    pub fn destination(mut self, destination: Destination) -> Self {
        self.destinations.push(destination);
        self
    }

    /// What the URL leads to. [`Route::TransactionPooler`] gives up what does not
    /// work there, waking by notification above all, so that rows are found within
    /// [`with_poll`](Self::with_poll). Default [`Route::Direct`]; a dispatcher that
    /// notices that notifications do not reach it polls too, and says so once. It
    /// means nothing in memory.
    pub fn with_route(mut self, route: Route) -> Self {
        if let Target::Postgres { route: taken, .. } = &mut self.target {
            *taken = route;
        }
        self
    }

    /// The most rows of one claim and of one settlement. Zero is refused.
    /// Default 500: beyond it nothing is gained, far below it each row pays for
    /// round trips.
    pub fn with_batch(mut self, rows: usize) -> Self {
        self.batch = rows;
        self
    }

    /// How long a claim holds unless it is renewed, which happens each third of
    /// it. A process that is gone for longer loses its claims, and their
    /// outcomes become unknown. Below 100 ms and above a day is refused. Default
    /// 60 s: longer than any pause that is not a failure.
    pub fn with_lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// How often to look for due rows when nothing wakes the dispatcher. Zero is
    /// refused; longer than 1 s holds only while notifications are sure to arrive.
    /// Default 1 s: the net under the notifications.
    pub fn with_poll(mut self, poll: Duration) -> Self {
        self.poll = poll;
        self
    }

    /// When a claim that no dispatcher of ours made counts as lapsed. Longer
    /// than the longest call and sweep of the other implementation; zero is
    /// refused. Default 5 min.
    pub fn with_foreign_lease(mut self, lease: Duration) -> Self {
        self.foreign_lease = lease;
        self
    }

    /// How often lapsed claims and unknown outcomes are looked for. Zero is
    /// refused. Default 5 s: short beside the lease.
    pub fn with_maintenance_interval(mut self, interval: Duration) -> Self {
        self.maintenance = interval;
        self
    }

    /// Checks the settings. Connects to nothing.
    ///
    /// # Errors
    /// [`ConfigError`] names the setting that makes no sense.
    pub fn build(self) -> Result<Dispatcher, ConfigError> {
        self.check()?;
        Ok(Dispatcher::from_builder(self))
    }

    /// [`build`](Self::build), then [`start`](Dispatcher::start).
    ///
    /// # Errors
    /// As [`build`](Self::build).
    pub fn start(self) -> Result<DispatcherHandle, ConfigError> {
        Ok(self.build()?.start())
    }

    fn check(&self) -> Result<(), ConfigError> {
        let has_nul = match &self.target {
            Target::Postgres { url, .. } => url.contains('\0'),
            Target::Memory(_) => false,
        };
        let fault = if has_nul {
            Some("database_url")
        } else if self.destinations.is_empty() {
            Some("destination")
        } else if self.batch == 0 {
            Some("batch")
        } else if self.lease < LEASE_LEAST || self.lease > LEASE_MOST {
            Some("lease")
        } else if self.poll.is_zero() {
            Some("poll")
        } else if self.foreign_lease.is_zero() {
            Some("foreign_lease")
        } else if self.maintenance.is_zero() {
            Some("maintenance_interval")
        } else {
            None
        };
        if let Some(field) = fault {
            return Err(ConfigError::new(field));
        }
        for (i, destination) in self.destinations.iter().enumerate() {
            destination.check()?;
            if self.destinations[..i]
                .iter()
                .any(|d| d.name == destination.name)
            {
                return Err(ConfigError::new("destination.name"));
            }
        }
        Ok(())
    }
}

impl fmt::Debug for DispatcherBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DispatcherBuilder")
            .field("destinations", &self.destinations.len())
            .field("batch", &self.batch)
            .field("lease", &self.lease)
            .field("poll", &self.poll)
            .finish_non_exhaustive()
    }
}
