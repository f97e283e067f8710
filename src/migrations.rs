//! The migrations as a constant, for services that migrate when they start.
//!
//! The main way is the other one: copy the folder `migrations/` into your own
//! and let the diesel CLI run it with the rest. Here the same files are embedded,
//! and [`run`] applies those that are missing:
//!
//! ```no_run
//! use diesel::prelude::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut conn = PgConnection::establish("postgres://localhost/shop")?;
//! for version in diesel_outbox::migrations::run(&mut conn)? {
//!     println!("migrated to {version}");
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Both ways record the versions in Diesel's `__diesel_schema_migrations`, side
//! by side with those of the host, so a database that one of them has migrated
//! is left alone by the other.

use diesel::prelude::*;
use diesel::sql_query;
use diesel::sql_types::BigInt;
use diesel_migrations::{EmbeddedMigrations, MigrationHarness, embed_migrations};

/// Every migration of this crate, for hosts that have a harness of their own.
///
/// [`run`] is the safe way where several processes start at once: Diesel's own
/// harness takes no lock, and of two that run it together one fails.
pub const MIGRATIONS: EmbeddedMigrations = embed_migrations!("migrations");

/// "tfoutmig": the advisory lock that migrating processes take in turn.
const LOCK: i64 = 0x7466_6f75_746d_6967;

/// Why the migrations did not run to their end.
///
/// Each migration is a transaction: the one that failed has left nothing, and
/// those before it stay. `Display` shows what the server said, for the person
/// who migrates; these messages name tables and indexes, never a row's content.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MigrationError {
    /// The lock was not granted: the connection was lost, or the session's
    /// `statement_timeout` or `lock_timeout` ended the wait for another process
    /// that migrates.
    #[error("the migration lock was not granted: {0}")]
    Lock(diesel::result::Error),
    /// A migration failed, or the list of those applied could not be read.
    #[error("a migration failed: {0}")]
    Failed(Box<dyn std::error::Error + Send + Sync>),
}

/// Applies the migrations that `conn`'s database lacks, oldest first, and
/// returns their versions; an empty list when there was nothing to do.
///
/// Any number of processes may call this at once: an advisory lock lets one
/// through at a time, and the others find the work done. It is a lock of the
/// session, released before this returns, whatever it returns.
///
/// Call it outside a transaction. Inside one it works, but the other processes
/// are let through before the transaction has committed, and fail.
///
/// # Errors
/// * [`MigrationError::Lock`] when the lock was not granted; nothing has changed.
/// * [`MigrationError::Failed`] when a migration failed, for example because
///   `tf_outbox` has an invalid index. What to do about it is in the message.
pub fn run(conn: &mut PgConnection) -> Result<Vec<String>, MigrationError> {
    let locked = Locked::take(conn).map_err(MigrationError::Lock)?;
    let applied = locked
        .0
        .run_pending_migrations(MIGRATIONS)
        .map_err(MigrationError::Failed)?;
    Ok(applied.iter().map(ToString::to_string).collect())
}

/// A connection whose session holds the lock until this is dropped, by a return
/// as by a panic. Where the session itself is lost, so is its lock.
struct Locked<'conn>(&'conn mut PgConnection);

impl<'conn> Locked<'conn> {
    fn take(conn: &'conn mut PgConnection) -> QueryResult<Self> {
        sql_query("SELECT pg_catalog.pg_advisory_lock($1)")
            .bind::<BigInt, _>(LOCK)
            .execute(conn)?;
        Ok(Self(conn))
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let released = sql_query("SELECT pg_catalog.pg_advisory_unlock($1)")
            .bind::<BigInt, _>(LOCK)
            .execute(self.0);
        if released.is_err() {
            tracing::warn!("the migration lock goes only with its connection");
        }
    }
}
