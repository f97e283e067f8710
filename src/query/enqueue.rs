//! – → pending.

use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::result::Error;
use serde_json::Value;
use uuid::Uuid;

use super::decode::StatusText;
use super::fault::{OrStoreError, Phase};
use super::transaction::transaction;
use crate::check::{self, MAX_PAYLOAD_BYTES};
use crate::entry::{OutboxEntry, cut};
use crate::error::StoreError;
use crate::id::OutboxId;
use crate::schema::tf_outbox;

/// What [`enqueue_once`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Enqueued {
    /// The row is new.
    New,
    /// The destination already has a row of this key: the same effect, asked
    /// for before.
    Duplicate {
        /// The row that is there.
        outbox_id: OutboxId,
        /// Whether it holds the same payload. If not, two different effects were
        /// given one key: a fault of the service.
        same_payload: bool,
    },
}

/// How large a row may be. The functions of this module use the default; where a
/// service means to allow more, or less, it enqueues through a value of this.
///
/// ```no_run
/// # use diesel_outbox::{EnqueueLimits, OutboxEntry};
/// # fn example(conn: &mut diesel::PgConnection, entry: &OutboxEntry) -> Result<(), diesel_outbox::StoreError> {
/// let limits = EnqueueLimits::default().with_max_payload(4 << 20)?;
/// limits.enqueue(conn, entry)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EnqueueLimits {
    max_payload: usize,
}

impl Default for EnqueueLimits {
    fn default() -> Self {
        Self {
            max_payload: MAX_PAYLOAD_BYTES,
        }
    }
}

impl EnqueueLimits {
    /// The most bytes of JSON that payload and headers may have together. Zero is
    /// refused, and so is more than 255 MiB, which is what a `jsonb` holds
    /// (PostgreSQL's `JENTRY_OFFLENMASK`). Default 1 MiB: a larger row belongs
    /// into an object store, with its address in the payload.
    ///
    /// # Errors
    /// [`StoreError::Other`] with `…invalid_record`, naming `max_payload`.
    pub const fn with_max_payload(mut self, bytes: usize) -> Result<Self, StoreError> {
        if bytes == 0 || bytes > JSONB_BYTES {
            return Err(StoreError::invalid("max_payload"));
        }
        self.max_payload = bytes;
        Ok(self)
    }

    /// [`enqueue`], within these limits.
    ///
    /// # Errors
    /// As [`enqueue`].
    pub fn enqueue(self, conn: &mut PgConnection, entry: &OutboxEntry) -> Result<(), StoreError> {
        match insert(conn, &NewRow::of(entry, self)?)? {
            true => Ok(()),
            false => Err(StoreError::Conflict),
        }
    }

    /// [`enqueue_once`], within these limits.
    ///
    /// # Errors
    /// As [`enqueue_once`].
    pub fn enqueue_once(
        self,
        conn: &mut PgConnection,
        entry: &OutboxEntry,
    ) -> Result<Enqueued, StoreError> {
        // A conflict that the database raises has aborted the transaction: nothing
        // can be looked up in it.
        match insert(conn, &NewRow::of(entry, self)?)? {
            true => Ok(Enqueued::New),
            false => duplicate_of(conn, entry),
        }
    }

    /// [`enqueue_all`], within these limits.
    ///
    /// # Errors
    /// As [`enqueue_all`].
    pub fn enqueue_all(
        self,
        conn: &mut PgConnection,
        entries: &[OutboxEntry],
    ) -> Result<(), StoreError> {
        let rows = entries
            .iter()
            .map(|entry| NewRow::of(entry, self))
            .collect::<Result<Vec<_>, _>>()?;
        all_or_none(conn, &rows)
    }
}

/// What a `jsonb` holds at most, to the next lower MiB.
const JSONB_BYTES: usize = 255 << 20;

/// Rows of one INSERT: far below the 65,535 parameters of one statement.
const CHUNK: usize = 1000;

/// Enqueues `entry` inside the transaction that `conn` is in: the row becomes
/// visible, and is sent, if and only if that transaction commits.
///
/// Everything that can be checked is checked before any SQL. Under READ
/// COMMITTED a duplicate leaves the transaction usable; every other error that
/// comes from the database aborts it, as PostgreSQL has it, **and must fail the
/// caller's closure**: Diesel reports the COMMIT of an aborted transaction,
/// which PostgreSQL answers with ROLLBACK, as `Ok`.
///
/// Payload and headers may hold up to [`MAX_PAYLOAD_BYTES`] together;
/// [`EnqueueLimits`] changes that.
///
/// # Errors
/// * [`StoreError::Other`] with `…invalid_record`, naming the field: the status
///   is not `Pending`, a length is out of bounds, the attempt count does not fit
///   the column. No SQL was sent.
/// * [`StoreError::Serialization`], naming the field: a NUL in text or JSON,
///   JSON nested deeper than 127, an instant before 4714 BC. No SQL was sent.
/// * [`StoreError::Conflict`]: the id, or the key at this destination, exists.
/// * [`StoreError::Unavailable`], [`StoreError::Timeout`]: see [`StoreError`].
pub fn enqueue(conn: &mut PgConnection, entry: &OutboxEntry) -> Result<(), StoreError> {
    EnqueueLimits::default().enqueue(conn, entry)
}

/// Whether the row is new; a duplicate is no error of the database, so that the
/// caller's transaction lives.
fn insert(conn: &mut PgConnection, row: &NewRow<'_>) -> Result<bool, StoreError> {
    let phase = Phase::of_write(conn);
    let inserted = diesel::insert_into(tf_outbox::table)
        .values(row)
        .on_conflict_do_nothing()
        .execute(conn)
        .or_store_error(phase)?;
    Ok(inserted == 1)
}

/// Enqueues `entry`, or finds the row that its destination already has under
/// its key. Fit for a request that may be repeated.
///
/// # Errors
/// As [`enqueue`]; [`StoreError::Conflict`] only where the *id* exists under
/// another key, or under a stricter isolation than READ COMMITTED.
pub fn enqueue_once(conn: &mut PgConnection, entry: &OutboxEntry) -> Result<Enqueued, StoreError> {
    EnqueueLimits::default().enqueue_once(conn, entry)
}

/// The row that stands in the way of `entry`.
fn duplicate_of(conn: &mut PgConnection, entry: &OutboxEntry) -> Result<Enqueued, StoreError> {
    tf_outbox::table
        .filter(tf_outbox::destination.eq(&entry.destination))
        .filter(tf_outbox::idempotency_key.eq(&entry.idempotency_key))
        .select((tf_outbox::outbox_id, tf_outbox::payload.eq(&entry.payload)))
        .first::<(Uuid, bool)>(conn)
        .optional()
        .or_store_error(Phase::Read)?
        .map(|(id, same_payload)| Enqueued::Duplicate {
            outbox_id: OutboxId(id),
            same_payload,
        })
        .ok_or(StoreError::Conflict)
}

/// Enqueues all of `entries`, or none: one that exists already, or stands twice
/// among them, refuses the whole call.
///
/// # Errors
/// As [`enqueue`]. Every entry is checked before any SQL. A
/// [`StoreError::Conflict`] leaves a READ COMMITTED transaction usable and
/// without any of the rows (a savepoint sees to it).
pub fn enqueue_all(conn: &mut PgConnection, entries: &[OutboxEntry]) -> Result<(), StoreError> {
    EnqueueLimits::default().enqueue_all(conn, entries)
}

fn all_or_none(conn: &mut PgConnection, rows: &[NewRow<'_>]) -> Result<(), StoreError> {
    if rows.is_empty() {
        return Ok(());
    }
    if Phase::of_write(conn) == Phase::Commit {
        // A transaction of its own: a lost INSERT wrote nothing, a lost COMMIT
        // may have.
        return transaction(conn, "BEGIN", |conn| {
            match insert_all(conn, rows).or_store_error(Phase::Statement)? {
                true => Ok(()),
                false => Err(StoreError::Conflict),
            }
        });
    }
    let inserted = conn.transaction(|conn| match insert_all(conn, rows)? {
        true => Ok(()),
        false => Err(Error::RollbackTransaction),
    });
    match inserted {
        Err(Error::RollbackTransaction) => Err(StoreError::Conflict),
        other => other.or_store_error(Phase::Statement),
    }
}

/// Whether all rows are new; if not, some of them may have been inserted.
fn insert_all(conn: &mut PgConnection, rows: &[NewRow<'_>]) -> QueryResult<bool> {
    for chunk in rows.chunks(CHUNK) {
        let inserted = diesel::insert_into(tf_outbox::table)
            .values(chunk)
            .on_conflict_do_nothing()
            .execute(conn)?;
        if inserted != chunk.len() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The row as it is inserted; the columns that are ours take their defaults.
#[derive(Debug, Insertable)]
#[diesel(table_name = tf_outbox)]
struct NewRow<'a> {
    outbox_id: Uuid,
    command_id: Uuid,
    destination: &'a str,
    payload: &'a Value,
    idempotency_key: &'a str,
    status: StatusText,
    attempt_count: i32,
    next_attempt_at: Option<chrono::DateTime<chrono::Utc>>,
    created_at: chrono::DateTime<chrono::Utc>,
    completed_at: Option<chrono::DateTime<chrono::Utc>>,
    headers: Option<Value>,
    ordering_key: Option<&'a str>,
}

impl<'a> NewRow<'a> {
    fn of(entry: &'a OutboxEntry, limits: EnqueueLimits) -> Result<Self, StoreError> {
        check::entry(entry, limits.max_payload)?;
        Ok(Self {
            outbox_id: entry.outbox_id.0,
            command_id: entry.command_id.0,
            destination: &entry.destination,
            payload: &entry.payload,
            idempotency_key: &entry.idempotency_key,
            status: StatusText(entry.status),
            attempt_count: check::attempts(entry.attempt_count)?,
            next_attempt_at: entry.next_attempt_at.map(cut),
            created_at: cut(entry.created_at),
            completed_at: entry.completed_at.map(cut),
            headers: entry.headers.clone().map(Value::Object),
            ordering_key: entry.ordering_key.as_deref(),
        })
    }
}
