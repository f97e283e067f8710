//! What the application implements: calling the remote, and asking it.

use std::time::Duration;

use crate::entry::OutboxEntry;
use crate::record::OutboxRecord;

/// How one call ended, as the sender judges it.
///
/// There is no `Result` around it: every failure of a call must land in exactly
/// one of these, because the only question that matters is *may this be sent
/// again?*
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Dispatched {
    /// The remote accepted it and said so. The row becomes `completed`.
    Completed {
        /// The remote's own reference, up to 1,024 bytes.
        remote_ref: Option<String>,
    },
    /// It demonstrably did not arrive. The row goes back to `pending` with
    /// backoff, or becomes `failed` once its attempts are spent.
    Retryable {
        /// A stable code: 1 to 100 of `A-Z a-z 0-9 . _ -`.
        code: String,
        /// How long the remote itself asks to be left alone, as in the header
        /// `Retry-After` of HTTP (RFC 9110, 10.2.3). It replaces the delay of the
        /// destination's [`Backoff`](crate::Backoff), without jitter, and is cut to
        /// between its initial and its longest delay. `None`: the backoff decides.
        retry_after: Option<Duration>,
    },
    /// The remote refused it and would again. The row becomes `failed`.
    Permanent {
        /// A stable code: 1 to 100 of `A-Z a-z 0-9 . _ -`.
        code: String,
    },
    /// The request left and no answer came; the effect may exist. The row
    /// becomes `outcome_unknown`.
    Unknown {
        /// The remote's own reference, where it gave one before it went quiet.
        remote_ref: Option<String>,
    },
}

impl Dispatched {
    /// The remote accepted it, without a reference.
    #[must_use]
    pub const fn completed() -> Self {
        Self::Completed { remote_ref: None }
    }

    /// It did not arrive, for the reason `code`.
    #[must_use]
    pub fn retryable(code: impl Into<String>) -> Self {
        Self::Retryable {
            code: code.into(),
            retry_after: None,
        }
    }

    /// It did not arrive, for the reason `code`, and the remote asks to be left
    /// alone for `wait`.
    #[must_use]
    pub fn retryable_after(code: impl Into<String>, wait: Duration) -> Self {
        Self::Retryable {
            code: code.into(),
            retry_after: Some(wait),
        }
    }

    /// The remote refused it, for the reason `code`.
    #[must_use]
    pub fn permanent(code: impl Into<String>) -> Self {
        Self::Permanent { code: code.into() }
    }

    /// No answer came.
    #[must_use]
    pub const fn unknown() -> Self {
        Self::Unknown { remote_ref: None }
    }
}

/// Calls the remote system for one row. Any
/// `Fn(&OutboxEntry) -> Dispatched + Send + Sync` is one.
///
/// Two obligations are the application's:
///
/// * forward [`OutboxEntry::idempotency_key`] with every attempt;
/// * answer honestly. An error after the bytes were written is
///   [`Dispatched::Unknown`], not [`Dispatched::Retryable`]. If the two cannot be
///   told apart, it is `Unknown`.
///
/// Give the call a timeout of its own below the destination's `send_timeout`: a
/// thread that hangs cannot be ended, only left behind. A panic counts as
/// `Unknown`.
pub trait OutboxSender: Send + Sync {
    /// Sends one row. No database transaction and no pooled connection of ours
    /// is held meanwhile.
    fn send(&self, entry: &OutboxEntry) -> Dispatched;
}

impl<F> OutboxSender for F
where
    F: Fn(&OutboxEntry) -> Dispatched + Send + Sync,
{
    fn send(&self, entry: &OutboxEntry) -> Dispatched {
        self(entry)
    }
}

/// What a reconciler found out.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reconciled {
    /// The remote has it. The row becomes `completed`.
    Completed,
    /// The remote does not have it and never will. The row becomes `failed`.
    Failed {
        /// A stable code: 1 to 100 of `A-Z a-z 0-9 . _ -`.
        code: String,
    },
    /// The remote is *certain* never to have received it: send it again. This is
    /// the one answer that can turn an unknown outcome into a second call. Mind
    /// [`OutboxRecord::unknown_for`]: a request given up a moment ago may still
    /// land.
    Resend,
    /// Still unknown. It is asked again by the destination's probe backoff.
    Unresolved,
}

/// Asks the remote system what became of a row whose outcome is unknown. Any
/// `Fn(&OutboxRecord) -> Reconciled + Send + Sync` is one. A panic counts as
/// [`Reconciled::Unresolved`].
pub trait OutboxReconciler: Send + Sync {
    /// Finds out about one row. No transaction is open meanwhile.
    fn reconcile(&self, record: &OutboxRecord) -> Reconciled;
}

impl<F> OutboxReconciler for F
where
    F: Fn(&OutboxRecord) -> Reconciled + Send + Sync,
{
    fn reconcile(&self, record: &OutboxRecord) -> Reconciled {
        self(record)
    }
}
