//! Begin and commit by hand: an error must be judged by whether it came before
//! COMMIT or from it.

use diesel::connection::{AnsiTransactionManager, TransactionManager};
use diesel::pg::PgConnection;

use super::fault::{OrStoreError, Phase};
use crate::error::StoreError;

/// `begin`, `operation`, COMMIT; or ROLLBACK where the operation fails. If it
/// panics, the transaction stays open and a pool must drop the connection, as
/// r2d2 does.
pub(crate) fn transaction<T>(
    conn: &mut PgConnection,
    begin: &str,
    operation: impl FnOnce(&mut PgConnection) -> Result<T, StoreError>,
) -> Result<T, StoreError> {
    AnsiTransactionManager::begin_transaction_sql(conn, begin).or_store_error(Phase::Statement)?;
    match operation(conn) {
        Ok(value) => {
            AnsiTransactionManager::commit_transaction(conn).or_store_error(Phase::Commit)?;
            Ok(value)
        }
        Err(error) => {
            // What the operation failed with says more than a failing ROLLBACK;
            // a connection that cannot roll back is broken, and dropped.
            let _ = AnsiTransactionManager::rollback_transaction(conn);
            Err(error)
        }
    }
}
