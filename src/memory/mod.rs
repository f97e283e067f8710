//! An outbox without a database, for the tests of an application.

mod backend;
mod clock;
mod table;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use chrono::{DateTime, Utc};
use crossbeam_channel::{Receiver, Sender, bounded};

pub(crate) use backend::MemoryBackend;
use clock::Clock;
pub use clock::FakeClock;
use table::Table;

use crate::check;
use crate::dispatcher::knock;
use crate::entry::{OutboxEntry, cut};
use crate::error::StoreError;
use crate::id::{CommandId, OutboxId};
use crate::query::Enqueued;
use crate::record::OutboxRecord;
use crate::store::{OutboxReader, OutboxWriter};

/// An outbox in memory, with the contract of the one in PostgreSQL: the same
/// answers, the same refusals, the same rows ([`conformance`](crate::conformance)
/// runs on both). Clones are one outbox.
///
/// What it cannot have is your transaction: a row is there when
/// [`enqueue`](OutboxWriter::enqueue) returns. And it is gone with the process, so it
/// is for tests, not for production.
///
/// A dispatcher works on it with [`Dispatcher::in_memory`](crate::Dispatcher::in_memory):
///
/// ```
/// use std::time::Duration;
/// use diesel_outbox::{
///     Destination, Dispatched, Dispatcher, FakeClock, MemoryOutbox, OutboxEntry, OutboxStatus,
///     OutboxWriter,
/// };
///
/// let clock = FakeClock::at("2026-01-01T00:00:00Z".parse()?);
/// let outbox = MemoryOutbox::with_clock(&clock);
/// let mut dispatcher = Dispatcher::in_memory(&outbox)
///     .destination(Destination::idempotent("mail", |entry: &OutboxEntry| {
///         match entry.attempt_count {
///             1 => Dispatched::retryable("mail.busy"),
///             _ => Dispatched::completed(),
///         }
///     }))
///     .build()?;
/// outbox.enqueue(&OutboxEntry::new("mail", "welcome-17", &"hello")?)?;
///
/// dispatcher.run_once()?;
/// assert_eq!(outbox.rows()[0].entry.status, OutboxStatus::Pending);
/// assert_eq!(outbox.rows()[0].last_failure.as_deref(), Some("mail.busy"));
///
/// clock.advance(Duration::from_secs(3600)); // the backoff is over
/// dispatcher.run_once()?;
/// assert_eq!(outbox.rows()[0].entry.status, OutboxStatus::Completed);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct MemoryOutbox {
    inner: Arc<Inner>,
}

/// What the clones of an outbox, and the dispatchers on it, share.
pub(crate) struct Inner {
    table: Mutex<Table>,
    clock: Clock,
    listeners: Mutex<Vec<Sender<()>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No operation panics half-way.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inner {
    /// Each use is a transaction: nobody else sees or does anything meanwhile.
    fn with<T>(&self, work: impl FnOnce(&mut Table, DateTime<Utc>) -> T) -> T {
        let mut table = lock(&self.table);
        let now = self.clock.now();
        work(&mut table, now)
    }

    /// Hears of rows that may be due.
    fn changed(&self) -> Receiver<()> {
        let (listener, changed) = bounded(1);
        lock(&self.listeners).push(listener);
        changed
    }

    fn tell(&self) {
        lock(&self.listeners).retain(knock);
    }
}

impl Default for MemoryOutbox {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryOutbox {
    /// Empty, with the time of the system.
    #[must_use]
    pub fn new() -> Self {
        Self::on(Clock::System)
    }

    /// Empty, with a time that is moved by hand.
    #[must_use]
    pub fn with_clock(clock: &FakeClock) -> Self {
        Self::on(Clock::Fake(clock.clone()))
    }

    fn on(clock: Clock) -> Self {
        Self {
            inner: Arc::new(Inner {
                table: Mutex::default(),
                clock,
                listeners: Mutex::default(),
            }),
        }
    }

    /// Every row, by (`created_at`, id).
    #[must_use]
    pub fn rows(&self) -> Vec<OutboxRecord> {
        self.inner.with(|table, now| table.all(now))
    }

    pub(crate) fn backend(&self) -> MemoryBackend {
        MemoryBackend {
            inner: Arc::clone(&self.inner),
        }
    }

    /// A write after which rows may be due.
    fn write<T>(
        &self,
        work: impl FnOnce(&mut Table, DateTime<Utc>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let result = self.inner.with(work);
        self.inner.tell();
        result
    }
}

impl fmt::Debug for MemoryOutbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryOutbox")
            .field("rows", &self.rows().len())
            .finish_non_exhaustive()
    }
}

impl OutboxReader for MemoryOutbox {
    fn get(&self, outbox_id: OutboxId) -> Result<OutboxRecord, StoreError> {
        self.inner.with(|table, now| table.get(outbox_id, now))
    }

    fn list_for_command(&self, command_id: CommandId) -> Result<Vec<OutboxRecord>, StoreError> {
        Ok(self
            .inner
            .with(|table, now| table.of_command(command_id, now)))
    }
}

impl OutboxWriter for MemoryOutbox {
    fn enqueue(&self, entry: &OutboxEntry) -> Result<(), StoreError> {
        self.enqueue_all(std::slice::from_ref(entry))
    }

    fn enqueue_once(&self, entry: &OutboxEntry) -> Result<Enqueued, StoreError> {
        check::entry(entry, check::MAX_PAYLOAD_BYTES)?;
        self.write(|table, now| table.enqueue_once(entry, now))
    }

    fn enqueue_all(&self, entries: &[OutboxEntry]) -> Result<(), StoreError> {
        for entry in entries {
            check::entry(entry, check::MAX_PAYLOAD_BYTES)?;
        }
        self.write(|table, now| table.enqueue_all(entries, now))
    }

    fn claim_due(
        &self,
        at: DateTime<Utc>,
        limit: usize,
        worker_id: &str,
    ) -> Result<Vec<OutboxEntry>, StoreError> {
        check::text("worker_id", worker_id)?;
        check::instant("at", at)?;
        Ok(self
            .inner
            .with(|table, _| table.claim_due(cut(at), limit, worker_id)))
    }

    fn mark_completed(&self, outbox_id: OutboxId) -> Result<(), StoreError> {
        self.write(|table, now| table.mark_completed(outbox_id, now))
    }

    fn mark_failed(
        &self,
        outbox_id: OutboxId,
        reason: &str,
        retry_at: Option<DateTime<Utc>>,
    ) -> Result<(), StoreError> {
        check::text("reason", reason)?;
        match retry_at {
            Some(at) => {
                check::instant("next_attempt_at", at)?;
                self.write(|table, _| table.requeue(outbox_id, Some(reason), cut(at)))
            }
            None => self.write(|table, now| table.mark_failed(outbox_id, reason, now)),
        }
    }

    fn mark_outcome_unknown(
        &self,
        outbox_id: OutboxId,
        remote_ref: Option<&str>,
    ) -> Result<(), StoreError> {
        remote_ref.map_or(Ok(()), |text| check::text("remote_ref", text))?;
        self.write(|table, now| table.mark_outcome_unknown(outbox_id, remote_ref, now))
    }

    fn reschedule(&self, outbox_id: OutboxId, at: DateTime<Utc>) -> Result<(), StoreError> {
        check::instant("next_attempt_at", at)?;
        self.write(|table, _| table.requeue(outbox_id, None, cut(at)))
    }

    fn release_expired_claims(
        &self,
        claimed_before: DateTime<Utc>,
    ) -> Result<Vec<OutboxId>, StoreError> {
        check::instant("claimed_before", claimed_before)?;
        self.write(|table, _| Ok(table.release(cut(claimed_before))))
    }

    fn redrive(&self, outbox_id: OutboxId) -> Result<(), StoreError> {
        self.write(|table, _| table.redrive(outbox_id))
    }

    fn skip_failed(&self, outbox_id: OutboxId) -> Result<(), StoreError> {
        self.write(|table, _| table.skip_failed(outbox_id))
    }
}
