//! What can go wrong, and what the caller may conclude.

/// Stable codes: those of [`StoreError::Other`], and those that the dispatcher
/// writes into `last_failure` of a row. Fit for a dashboard; never free text.
///
/// They are shared with the async implementation where it has the same notion,
/// because both write into one table.
pub mod code {
    /// The record itself is illegal, or the database refused it by a check or
    /// not-null constraint. Nothing was written; do not retry.
    pub const INVALID_RECORD: &str = "turnframe.store.invalid_record";
    /// The database failed in a way that has no variant of its own.
    pub const DATABASE: &str = "turnframe.store.postgres.other";
    /// A row ran out of attempts.
    pub const ATTEMPTS_EXHAUSTED: &str = "turnframe.dispatch.attempts_exhausted";
    /// A claim was not settled before its lease was over.
    pub const LAPSED: &str = "turnframe.dispatch.lapsed";
    /// A row of unknown outcome has been asked about as often as its destination
    /// allows, and waits for an operator.
    pub const UNRESOLVED: &str = "turnframe.dispatch.unresolved";
    /// A claimed row holds a value that cannot be read.
    pub const CORRUPT_ROW: &str = "turnframe.dispatch.corrupt_row";
    /// A sender or reconciler gave a reason that is not a stable code.
    pub const INVALID_CODE: &str = "turnframe.dispatch.invalid_code";
    /// The sender panicked after its call had begun.
    pub const SENDER_PANICKED: &str = "turnframe.dispatch.sender_panicked";
    /// The sender did not answer within the destination's `send_timeout`.
    pub const SEND_TIMEOUT: &str = "turnframe.dispatch.send_timeout";
    /// The dispatcher was stopped while the sender ran.
    pub const STOPPED: &str = "turnframe.dispatch.stopped";

    /// Whether `text` may be stored as a reason: 1 to 100 characters of
    /// `A-Z a-z 0-9 . _ -`.
    #[must_use]
    pub fn is_stable(text: &str) -> bool {
        (1..=100).contains(&text.len())
            && text
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
    }
}

/// Everything that an operation of the outbox can fail with. Closed: there will
/// be no other variant.
///
/// `Display` and `Debug` hold codes and names of columns only, and
/// [`source`](std::error::Error::source) is always `None`: no message of the
/// database, payload, key or connection string crosses this type, because a
/// message can quote the row. It is safe to log.
///
/// | variant | the caller may conclude |
/// |---|---|
/// | [`NotFound`](Self::NotFound) | there is no such row |
/// | [`Conflict`](Self::Conflict) | nothing was written |
/// | [`Unavailable`](Self::Unavailable) | nothing was written; retry |
/// | [`Timeout`](Self::Timeout) | **it may have been written**: read again, never retry blindly |
/// | [`Serialization`](Self::Serialization) | nothing was written |
/// | [`Corrupt`](Self::Corrupt) | what is stored cannot be read |
/// | [`Other`](Self::Other) | see the code |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum StoreError {
    /// The row does not exist.
    #[error("outbox row not found")]
    NotFound,
    /// A unique, exclusion or foreign key constraint refused it, the row was not
    /// in the state that the operation expects, or the transaction lost a race
    /// (serialization failure, deadlock). Nothing was written.
    #[error("outbox conflict")]
    Conflict,
    /// No connection to be had, or it was lost before COMMIT, or the server only
    /// reads. Nothing was written.
    #[error("outbox database unavailable")]
    Unavailable,
    /// The statement was cancelled by a timeout, or COMMIT did not answer. It
    /// may have been written.
    #[error("outbox operation timed out; it may have been written")]
    Timeout,
    /// A value cannot be encoded: a NUL in text or JSON, an instant outside of
    /// what the column holds. Nothing was written.
    #[error("value cannot be stored{}", Place(*field))]
    Serialization {
        /// The field of the entry, or argument, that holds the value.
        field: Option<&'static str>,
    },
    /// A stored value cannot be decoded, or is none of those allowed.
    #[error("stored value is corrupt{}", Place(*field))]
    Corrupt {
        /// The column that holds the value, where known.
        field: Option<&'static str>,
    },
    /// Anything else, by a stable code of [`code`].
    #[error("outbox failure {code}{}", Place(*field))]
    Other {
        /// One of the constants in [`code`].
        code: &'static str,
        /// The field that is at fault, where one is.
        field: Option<&'static str>,
    },
}

impl StoreError {
    /// The refusal of an illegal record, naming the field.
    pub(crate) const fn invalid(field: &'static str) -> Self {
        Self::Other {
            code: code::INVALID_RECORD,
            field: Some(field),
        }
    }

    /// The refusal of a value that the database cannot hold.
    pub(crate) const fn unencodable(field: &'static str) -> Self {
        Self::Serialization { field: Some(field) }
    }

    /// A stored value that cannot be read.
    pub(crate) const fn corrupt(field: &'static str) -> Self {
        Self::Corrupt { field: Some(field) }
    }

    /// Whether doing the same again, later, can succeed without a change: the
    /// database was away, slow, or another transaction won.
    #[must_use]
    pub const fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable | Self::Timeout | Self::Conflict)
    }

    /// Whether this is [`Other`](Self::Other) with
    /// [`code::INVALID_RECORD`].
    #[must_use]
    pub fn is_invalid_record(&self) -> bool {
        matches!(self, Self::Other { code, .. } if *code == code::INVALID_RECORD)
    }
}

/// `" (field)"`, or nothing.
struct Place(Option<&'static str>);

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(field) => write!(f, " ({field})"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stable_code_is_short_and_plain() {
        assert!(code::is_stable("x.down-1_A"));
        assert!(code::is_stable(&"a".repeat(100)));
        assert!(!code::is_stable(&"a".repeat(101)));
        assert!(!code::is_stable(""));
        assert!(!code::is_stable("card 4111"));
        assert!(!code::is_stable("é"));
    }

    #[test]
    fn display_names_the_field_and_nothing_else() {
        assert_eq!(
            StoreError::invalid("destination").to_string(),
            "outbox failure turnframe.store.invalid_record (destination)"
        );
        assert_eq!(
            StoreError::unencodable("payload").to_string(),
            "value cannot be stored (payload)"
        );
        assert_eq!(StoreError::Conflict.to_string(), "outbox conflict");
    }
}
