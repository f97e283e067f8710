//! The store: every operation as one committed transaction on a pooled
//! connection.

use std::fmt;
use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::connection::{AnsiTransactionManager, TransactionManager};
use diesel::pg::PgConnection;
use diesel::r2d2::{ConnectionManager, Pool, PooledConnection, R2D2Connection};
use r2d2::HandleError;

use crate::entry::OutboxEntry;
use crate::error::StoreError;
use crate::id::{CommandId, OutboxId};
use crate::query::{self, EnqueueLimits, Enqueued};
use crate::record::OutboxRecord;

/// The read half of an outbox.
pub trait OutboxReader: Send + Sync {
    /// Loads one row. See [`query::get`].
    ///
    /// # Errors
    /// [`StoreError::NotFound`], [`StoreError::Corrupt`]; see [`StoreError`].
    fn get(&self, outbox_id: OutboxId) -> Result<OutboxRecord, StoreError>;

    /// The rows of one command. See [`query::list_for_command`].
    ///
    /// # Errors
    /// [`StoreError::Corrupt`]; see [`StoreError`].
    fn list_for_command(&self, command_id: CommandId) -> Result<Vec<OutboxRecord>, StoreError>;
}

/// The write half of an outbox. Each call is one transaction: when it returns
/// `Ok`, it is committed.
pub trait OutboxWriter: Send + Sync {
    /// Enqueues one row. To enqueue in the same transaction as a change of your
    /// own, which is what an outbox is for, use [`query::enqueue`].
    ///
    /// # Errors
    /// As [`query::enqueue`].
    fn enqueue(&self, entry: &OutboxEntry) -> Result<(), StoreError>;

    /// Enqueues one row, or finds the one of the same key. See
    /// [`query::enqueue_once`].
    ///
    /// # Errors
    /// As [`query::enqueue_once`].
    fn enqueue_once(&self, entry: &OutboxEntry) -> Result<Enqueued, StoreError>;

    /// Enqueues all rows or none. See [`query::enqueue_all`].
    ///
    /// # Errors
    /// As [`query::enqueue_all`].
    fn enqueue_all(&self, entries: &[OutboxEntry]) -> Result<(), StoreError>;

    /// Claims due rows of any destination. See [`query::claim_due`].
    ///
    /// # Errors
    /// As [`query::claim_due`].
    fn claim_due(
        &self,
        at: DateTime<Utc>,
        limit: usize,
        worker_id: &str,
    ) -> Result<Vec<OutboxEntry>, StoreError>;

    /// The remote confirmed. See [`query::mark_completed`].
    ///
    /// # Errors
    /// As [`query::mark_completed`].
    fn mark_completed(&self, outbox_id: OutboxId) -> Result<(), StoreError>;

    /// Records a failure, final or to be retried. See [`query::mark_failed`].
    ///
    /// # Errors
    /// As [`query::mark_failed`].
    fn mark_failed(
        &self,
        outbox_id: OutboxId,
        reason: &str,
        retry_at: Option<DateTime<Utc>>,
    ) -> Result<(), StoreError>;

    /// Nobody knows how the call ended. See [`query::mark_outcome_unknown`].
    ///
    /// # Errors
    /// As [`query::mark_outcome_unknown`].
    fn mark_outcome_unknown(
        &self,
        outbox_id: OutboxId,
        remote_ref: Option<&str>,
    ) -> Result<(), StoreError>;

    /// Puts a row back. See [`query::reschedule`].
    ///
    /// # Errors
    /// As [`query::reschedule`].
    fn reschedule(&self, outbox_id: OutboxId, at: DateTime<Utc>) -> Result<(), StoreError>;

    /// Puts back rows of claims that are known to have sent nothing. See
    /// [`query::release_expired_claims`].
    ///
    /// # Errors
    /// As [`query::release_expired_claims`].
    fn release_expired_claims(
        &self,
        claimed_before: DateTime<Utc>,
    ) -> Result<Vec<OutboxId>, StoreError>;

    /// Sends a failed row again. See [`query::redrive`].
    ///
    /// # Errors
    /// As [`query::redrive`].
    fn redrive(&self, outbox_id: OutboxId) -> Result<(), StoreError>;

    /// Lets later rows of its key pass a failed row. See [`query::skip_failed`].
    ///
    /// # Errors
    /// As [`query::skip_failed`].
    fn skip_failed(&self, outbox_id: OutboxId) -> Result<(), StoreError>;
}

/// Both halves of an outbox; there is nothing to implement.
pub trait OutboxStore: OutboxReader + OutboxWriter {}

impl<T: OutboxReader + OutboxWriter + ?Sized> OutboxStore for T {}

/// The outbox in PostgreSQL, over an r2d2 pool.
///
/// Cloning shares the pool. `Debug` shows no connection string.
///
/// ```no_run
/// use diesel_outbox::{OutboxEntry, OutboxWriter, PgOutbox};
///
/// let outbox = PgOutbox::connect("postgres://localhost/shop")?;
/// outbox.enqueue(&OutboxEntry::new("payments", "order-17", &"charge")?)?;
/// # Ok::<(), diesel_outbox::StoreError>(())
/// ```
#[derive(Clone)]
pub struct PgOutbox {
    pool: Pool<ConnectionManager<PgConnection>>,
    limits: EnqueueLimits,
}

impl PgOutbox {
    /// A store on `url` with the defaults of [`builder`](Self::builder). No
    /// connection is made before it is needed, so the server may be down.
    ///
    /// # Errors
    /// [`StoreError::Other`] with `…invalid_record` where a setting makes no
    /// sense; never with these defaults.
    pub fn connect(url: &str) -> Result<Self, StoreError> {
        Self::builder(url).build()
    }

    /// A store on `url`, to be configured.
    pub fn builder(url: &str) -> PgOutboxBuilder {
        PgOutboxBuilder {
            url: url.to_owned(),
            max_size: 10,
            acquire_timeout: Duration::from_secs(5),
            limits: EnqueueLimits::default(),
        }
    }

    /// A store on a pool that the service already has, with that pool's
    /// settings. Keep r2d2's `test_on_check_out` on (its default): without it a
    /// connection that died while idle fails the one call that gets it. Note that
    /// r2d2's default error handler logs libpq's text, which can hold a host or
    /// user name.
    #[must_use]
    pub fn from_pool(pool: Pool<ConnectionManager<PgConnection>>) -> Self {
        Self {
            pool,
            limits: EnqueueLimits::default(),
        }
    }

    /// The same store with other limits for what it enqueues.
    #[must_use]
    pub fn with_limits(mut self, limits: EnqueueLimits) -> Self {
        self.limits = limits;
        self
    }

    fn connection(&self) -> Result<PooledConnection<ConnectionManager<PgConnection>>, StoreError> {
        // r2d2 says only that it timed out, whatever the reason.
        self.pool.get().map_err(|_| StoreError::Unavailable)
    }

    /// Runs `operation` in a transaction and commits it.
    ///
    /// Begin and commit are made by hand because an error must be judged by
    /// whether it came before COMMIT or from it. The isolation is pinned: the
    /// operations are made for READ COMMITTED, whatever the role's default. A
    /// server or role that only reads is left to say so.
    fn write<T>(
        &self,
        operation: impl FnOnce(&mut PgConnection) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let conn = &mut *self.connection()?;
        let result = query::transaction(conn, "BEGIN ISOLATION LEVEL READ COMMITTED", operation);
        give_up_if_dead(conn, &result);
        result
    }

    /// Runs `operation`, which only reads, as a statement of its own.
    fn read<T>(
        &self,
        operation: impl FnOnce(&mut PgConnection) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let conn = &mut *self.connection()?;
        let result = operation(conn);
        give_up_if_dead(conn, &result);
        result
    }
}

/// Diesel does not always notice that a statement failed because its connection
/// is gone, and then r2d2 would hand it out again and again, were it not for
/// `test_on_check_out`.
fn give_up_if_dead<T>(conn: &mut PgConnection, result: &Result<T, StoreError>) {
    if matches!(result, Err(StoreError::Unavailable | StoreError::Timeout)) && conn.ping().is_err()
    {
        AnsiTransactionManager::transaction_manager_status_mut(conn).set_in_error();
    }
}

impl fmt::Debug for PgOutbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PgOutbox")
            .field("connections", &self.pool.state().connections)
            .finish_non_exhaustive()
    }
}

/// Settings of a [`PgOutbox`] with a pool of its own.
#[derive(Clone)]
#[must_use]
pub struct PgOutboxBuilder {
    url: String,
    max_size: u32,
    acquire_timeout: Duration,
    limits: EnqueueLimits,
}

impl PgOutboxBuilder {
    /// The most connections held at once. Zero is refused. Default 10, as
    /// r2d2's: enough for a small service, and a tenth of a server's default
    /// `max_connections`.
    pub fn with_max_size(mut self, max_size: u32) -> Self {
        self.max_size = max_size;
        self
    }

    /// How long an operation waits for a connection before it is
    /// [`StoreError::Unavailable`]. Zero is refused. Default 5 s: a caller in a
    /// request would rather fail than wait r2d2's 30.
    pub fn with_acquire_timeout(mut self, timeout: Duration) -> Self {
        self.acquire_timeout = timeout;
        self
    }

    /// How large a row may be that the store enqueues. Default
    /// [`EnqueueLimits::default`]: 1 MiB.
    pub fn with_limits(mut self, limits: EnqueueLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Makes the store. Connects when first used.
    ///
    /// # Errors
    /// [`StoreError::Other`] with `…invalid_record`, naming the setting, where
    /// one makes no sense.
    pub fn build(self) -> Result<PgOutbox, StoreError> {
        if self.max_size == 0 {
            return Err(StoreError::invalid("max_size"));
        }
        if self.acquire_timeout.is_zero() {
            return Err(StoreError::invalid("acquire_timeout"));
        }
        let pool = Pool::builder()
            .max_size(self.max_size)
            .min_idle(Some(0))
            .connection_timeout(self.acquire_timeout)
            .error_handler(Box::new(SilentHandler))
            .build_unchecked(ConnectionManager::new(self.url));
        Ok(PgOutbox {
            pool,
            limits: self.limits,
        })
    }
}

impl fmt::Debug for PgOutboxBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PgOutboxBuilder")
            .field("max_size", &self.max_size)
            .field("acquire_timeout", &self.acquire_timeout)
            .finish_non_exhaustive()
    }
}

/// r2d2's default handler logs libpq's message, which names host and user.
#[derive(Debug)]
struct SilentHandler;

impl<E> HandleError<E> for SilentHandler {
    fn handle_error(&self, _: E) {
        tracing::warn!("the outbox store could not open a connection");
    }
}

impl OutboxReader for PgOutbox {
    fn get(&self, outbox_id: OutboxId) -> Result<OutboxRecord, StoreError> {
        self.read(|conn| query::get(conn, outbox_id))
    }

    fn list_for_command(&self, command_id: CommandId) -> Result<Vec<OutboxRecord>, StoreError> {
        self.read(|conn| query::list_for_command(conn, command_id))
    }
}

impl OutboxWriter for PgOutbox {
    fn enqueue(&self, entry: &OutboxEntry) -> Result<(), StoreError> {
        self.write(|conn| self.limits.enqueue(conn, entry))
    }

    fn enqueue_once(&self, entry: &OutboxEntry) -> Result<Enqueued, StoreError> {
        self.write(|conn| self.limits.enqueue_once(conn, entry))
    }

    fn enqueue_all(&self, entries: &[OutboxEntry]) -> Result<(), StoreError> {
        self.write(|conn| self.limits.enqueue_all(conn, entries))
    }

    fn claim_due(
        &self,
        at: DateTime<Utc>,
        limit: usize,
        worker_id: &str,
    ) -> Result<Vec<OutboxEntry>, StoreError> {
        self.write(|conn| query::claim_due(conn, at, limit, worker_id))
    }

    fn mark_completed(&self, outbox_id: OutboxId) -> Result<(), StoreError> {
        self.write(|conn| query::mark_completed(conn, outbox_id))
    }

    fn mark_failed(
        &self,
        outbox_id: OutboxId,
        reason: &str,
        retry_at: Option<DateTime<Utc>>,
    ) -> Result<(), StoreError> {
        self.write(|conn| query::mark_failed(conn, outbox_id, reason, retry_at))
    }

    fn mark_outcome_unknown(
        &self,
        outbox_id: OutboxId,
        remote_ref: Option<&str>,
    ) -> Result<(), StoreError> {
        self.write(|conn| query::mark_outcome_unknown(conn, outbox_id, remote_ref))
    }

    fn reschedule(&self, outbox_id: OutboxId, at: DateTime<Utc>) -> Result<(), StoreError> {
        self.write(|conn| query::reschedule(conn, outbox_id, at))
    }

    fn release_expired_claims(
        &self,
        claimed_before: DateTime<Utc>,
    ) -> Result<Vec<OutboxId>, StoreError> {
        self.write(|conn| query::release_expired_claims(conn, claimed_before))
    }

    fn redrive(&self, outbox_id: OutboxId) -> Result<(), StoreError> {
        self.write(|conn| query::redrive(conn, outbox_id))
    }

    fn skip_failed(&self, outbox_id: OutboxId) -> Result<(), StoreError> {
        self.write(|conn| query::skip_failed(conn, outbox_id))
    }
}
