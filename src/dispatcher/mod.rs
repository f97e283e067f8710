//! The dispatcher: claims due rows, calls the application's senders on a pool of
//! threads, and settles each row with what happened.
//!
//! ```text
//!            wake-ups (LISTEN · poll · a free slot)
//!                             │
//! claimer ── claim ──► [bounded channel] ──► workers ── outcome ──► [channel] ──► settler
//!    ▲                                                                               │
//!    └─────────────────────────── free slots ◄──────────────── committed ◄───────────┘
//! keeper: renews leases · watchdog: deadlines · maintenance: lapsed claims, unknown outcomes
//! ```
//!
//! | file | story |
//! |---|---|
//! | `config`, `destination` | the settings |
//! | `backend` | the seam: what is asked of the store |
//! | `claimer` | claims rows for free workers |
//! | `bell`, `listener` | the claimer's rest, and what wakes it |
//! | `guard` | sessions that answer by a deadline |
//! | `worker` | calls senders; the watchdog |
//! | `rate`, `breaker` | when a destination is left alone |
//! | `settler` | writes outcomes |
//! | `lease` | renews claims |
//! | `maintenance`, `reconcile` | lapsed claims and unknown outcomes |
//! | `handle`, `sweep` | start and stop; one sweep |
//! | `lane`, `flight`, `shared`, `stats` | what the threads share |

pub(crate) mod backend;
pub(crate) mod bell;
mod breaker;
mod claimer;
mod config;
mod destination;
mod flight;
mod guard;
mod handle;
mod lane;
mod lease;
mod listener;
mod maintenance;
mod rate;
mod reconcile;
mod settler;
mod shared;
mod stats;
mod sweep;
mod time;
mod worker;

use std::fmt;
use std::sync::Arc;

pub use config::{ConfigError, DispatcherBuilder, Route};
pub use destination::Destination;
pub use handle::{DispatcherHandle, StopReport};
pub use stats::{DestinationState, Pause, Stats};

use crate::claim::WORKER_PREFIX;
use crate::error::StoreError;
use crate::memory::MemoryOutbox;
use crate::postgres::PgBackend;
use backend::Backend;
pub(crate) use bell::knock;
use config::Target;
use shared::Shared;

/// A dispatcher that is configured and not yet at work.
///
/// ```no_run
/// use std::time::Duration;
/// use diesel_outbox::{Destination, Dispatched, Dispatcher, OutboxEntry};
///
/// let send = |entry: &OutboxEntry| {
///     println!("sending {}", entry.outbox_id);
///     Dispatched::completed()
/// };
/// let dispatcher = Dispatcher::builder("postgres://localhost/shop")
///     .destination(Destination::idempotent("payments", send))
///     .start()?;
/// // … until the service is told to end:
/// let report = dispatcher.stop(Duration::from_secs(10));
/// assert_eq!(report.left_unknown, 0);
/// # Ok::<(), diesel_outbox::ConfigError>(())
/// ```
pub struct Dispatcher {
    builder: DispatcherBuilder,
}

impl Dispatcher {
    /// A dispatcher on the database at `database_url`, in either form that libpq
    /// knows. It opens connections of its own, at most five, so that senders
    /// which exhaust the application's pool do not keep it from settling. The
    /// URL is never shown.
    pub fn builder(database_url: &str) -> DispatcherBuilder {
        DispatcherBuilder::new(Target::Postgres {
            url: database_url.to_owned(),
            route: Route::Direct,
        })
    }

    /// A dispatcher on an outbox in memory, for the tests of an application: the
    /// same threads, leases, backoff and settlement, and no database.
    pub fn in_memory(outbox: &MemoryOutbox) -> DispatcherBuilder {
        DispatcherBuilder::new(Target::Memory(outbox.clone()))
    }

    pub(crate) fn from_builder(builder: DispatcherBuilder) -> Self {
        Self { builder }
    }

    fn shared(&self) -> (Arc<Shared>, shared::Ends) {
        let builder = &self.builder;
        let backend: Arc<dyn Backend> = match &builder.target {
            Target::Postgres { url, route } => {
                let deadline = guard::deadline(builder.lease);
                Arc::new(PgBackend::new(url, *route, deadline))
            }
            Target::Memory(outbox) => Arc::new(outbox.backend()),
        };
        Shared::new(&self.builder, worker_id(), backend)
    }

    /// One sweep, for cron jobs and tests: lapsed claims and unknown outcomes are
    /// looked for, every row that is due is claimed and sent, and the call
    /// returns when all of them are settled. Rows that fall due meanwhile are
    /// sent too; rows that are put back with a delay are not waited for.
    ///
    /// Calls run on worker threads, as in a started dispatcher, so that
    /// `send_timeout` holds.
    ///
    /// # Errors
    /// [`StoreError`] when a look could not be made. What had been claimed is
    /// settled all the same.
    pub fn run_once(&mut self) -> Result<Stats, StoreError> {
        let (shared, ends) = self.shared();
        sweep::run(shared, ends)
    }

    /// Starts the threads. Connects in the background: a server that is down is
    /// waited for.
    #[must_use = "dropping the handle stops the dispatcher"]
    pub fn start(self) -> DispatcherHandle {
        let (shared, ends) = self.shared();
        DispatcherHandle::start(shared, ends)
    }
}

impl fmt::Debug for Dispatcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dispatcher")
            .field("settings", &self.builder)
            .finish()
    }
}

/// Unique for each start: host, process, and a random part.
fn worker_id() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname")
        .ok()
        .or_else(|| std::env::var("HOSTNAME").ok())
        .unwrap_or_default();
    let host: String = host
        .trim()
        .chars()
        .filter(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.'))
        .take(64)
        .collect();
    let unique = uuid::Uuid::new_v4().simple();
    format!("{WORKER_PREFIX}{host}/{}/{unique}", std::process::id())
}
