//! What goes wrong, and when: decided by the order's number alone, so that every
//! run of the demo shows the same.

/// How the payment provider misbehaves on the first request for an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Answers 503 and does nothing.
    Refuse,
    /// Takes the money and resets the connection.
    ResetAfterEffect,
    /// Resets the connection and does nothing.
    ResetBefore,
    /// Takes the money and answers after the caller's deadline.
    Late,
}

/// The fault of an order's first request. `key` is `order-N`.
pub(crate) fn of(key: &str) -> Option<Fault> {
    let number: u64 = key.rsplit('-').next()?.parse().ok()?;
    match number % 40 {
        3 | 23 => Some(Fault::Refuse),
        7 | 27 => Some(Fault::ResetAfterEffect),
        15 => Some(Fault::ResetBefore),
        11 => Some(Fault::Late),
        _ => None,
    }
}

impl Fault {
    /// The name in the ledger.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Refuse => "refused",
            Self::ResetAfterEffect => "reset_after_effect",
            Self::ResetBefore => "reset_before",
            Self::Late => "late",
        }
    }
}
