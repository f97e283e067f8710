//! Turning what Diesel reports into [`StoreError`].
//!
//! Diesel does not expose SQLSTATE: it maps a dozen codes to
//! [`DatabaseErrorKind`] and leaves the rest `Unknown` with a message in the
//! server's language. So an error is classified by its kind, and by the phase
//! in which it came. Only four messages are recognised, by their whole English
//! text; any other is [`StoreError::Other`], never a guess.

use diesel::connection::TransactionManager;
use diesel::pg::PgConnection;
use diesel::result::{DatabaseErrorKind, Error, QueryResult};
use diesel::{Connection, ConnectionError};

use crate::error::{StoreError, code};

/// What a lost connection leaves open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Inside a transaction, before its COMMIT: a lost connection wrote nothing.
    Statement,
    /// A statement that is its own transaction, or COMMIT itself: the server may
    /// have committed before the connection was lost.
    Commit,
    /// A statement that writes nothing.
    Read,
}

impl Phase {
    /// The phase of a write on a caller's connection: inside whatever
    /// transaction the caller is in, or as one of its own.
    pub(crate) fn of_write(conn: &mut PgConnection) -> Self {
        type Manager = <PgConnection as Connection>::TransactionManager;
        match Manager::transaction_manager_status_mut(conn).transaction_depth() {
            Ok(Some(_)) => Self::Statement,
            Ok(None) | Err(_) => Self::Commit,
        }
    }
}

/// `?` for results of Diesel.
pub(crate) trait OrStoreError<T> {
    fn or_store_error(self, phase: Phase) -> Result<T, StoreError>;
}

impl<T> OrStoreError<T> for QueryResult<T> {
    fn or_store_error(self, phase: Phase) -> Result<T, StoreError> {
        self.map_err(|error| classify(&error, phase))
    }
}

/// The contract's table of errors.
pub(crate) fn classify(error: &Error, phase: Phase) -> StoreError {
    match error {
        Error::NotFound => StoreError::NotFound,
        Error::DatabaseError(kind, information) => match kind {
            DatabaseErrorKind::UniqueViolation
            | DatabaseErrorKind::ForeignKeyViolation
            | DatabaseErrorKind::ExclusionViolation
            | DatabaseErrorKind::RestrictViolation
            | DatabaseErrorKind::SerializationFailure => StoreError::Conflict,
            DatabaseErrorKind::CheckViolation | DatabaseErrorKind::NotNullViolation => {
                StoreError::Other {
                    code: code::INVALID_RECORD,
                    field: None,
                }
            }
            DatabaseErrorKind::ReadOnlyTransaction => StoreError::Unavailable,
            DatabaseErrorKind::ClosedConnection => lost(phase),
            // Nothing left this process, unless it was a COMMIT: of that one we
            // cannot tell how far it came.
            DatabaseErrorKind::UnableToSendCommand => lost(phase),
            _ => by_message(information.message()),
        },
        // COMMIT failed and the ROLLBACK after it too. The first of the two
        // says what happened.
        Error::RollbackErrorOnCommit { commit_error, .. } => classify(commit_error, phase),
        Error::SerializationError(_) | Error::InvalidCString(_) => {
            StoreError::Serialization { field: None }
        }
        Error::DeserializationError(_) => StoreError::Corrupt { field: None },
        Error::BrokenTransactionManager => StoreError::Unavailable,
        _ => StoreError::Other {
            code: code::DATABASE,
            field: None,
        },
    }
}

fn lost(phase: Phase) -> StoreError {
    match phase {
        Phase::Commit => StoreError::Timeout,
        Phase::Statement | Phase::Read => StoreError::Unavailable,
    }
}

/// The only place that reads a message of the server, and only as a whole: a
/// server that speaks another language, or a trigger that imitates one, ends as
/// `Other`, which promises nothing.
fn by_message(message: &str) -> StoreError {
    match message {
        "deadlock detected" => StoreError::Conflict,
        "canceling statement due to statement timeout"
        | "canceling statement due to lock timeout" => StoreError::Timeout,
        "cannot set transaction read-write mode during recovery" => StoreError::Unavailable,
        _ => StoreError::Other {
            code: code::DATABASE,
            field: None,
        },
    }
}

/// A connection that could not be made: nothing was written.
pub(crate) fn connection_fault(error: &ConnectionError) -> StoreError {
    match error {
        ConnectionError::CouldntSetupConfiguration(error) => classify(error, Phase::Read),
        _ => StoreError::Unavailable,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn database(kind: DatabaseErrorKind, message: &str) -> Error {
        Error::DatabaseError(kind, Box::new(message.to_owned()))
    }

    #[test]
    fn a_lost_connection_is_unavailable_unless_it_may_have_committed() {
        for kind in [
            || DatabaseErrorKind::ClosedConnection,
            || DatabaseErrorKind::UnableToSendCommand,
        ] {
            let error = database(kind(), "gone");
            assert_eq!(classify(&error, Phase::Statement), StoreError::Unavailable);
            assert_eq!(classify(&error, Phase::Read), StoreError::Unavailable);
            assert_eq!(classify(&error, Phase::Commit), StoreError::Timeout);
            let both = Error::RollbackErrorOnCommit {
                rollback_error: Box::new(database(kind(), "gone")),
                commit_error: Box::new(database(kind(), "gone")),
            };
            assert_eq!(classify(&both, Phase::Commit), StoreError::Timeout);
        }
    }

    #[test]
    fn only_a_whole_message_is_recognised() {
        let by = |message| classify(&database(DatabaseErrorKind::Unknown, message), Phase::Read);
        assert_eq!(by("deadlock detected"), StoreError::Conflict);
        assert_eq!(
            by("canceling statement due to lock timeout"),
            StoreError::Timeout
        );
        let other = StoreError::Other {
            code: code::DATABASE,
            field: None,
        };
        assert_eq!(by("Verklemmung entdeckt"), other);
        assert_eq!(by("oh: deadlock detected"), other);
        assert_eq!(by("deadlock detected."), other);
    }
}
