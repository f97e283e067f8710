//! The five states of a row.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Where a row stands.
///
/// ```
/// use diesel_outbox::OutboxStatus::{Completed, Dispatching, OutcomeUnknown, Pending};
/// use diesel_outbox::OutboxStatus;
///
/// assert!(OutboxStatus::can_transition(Pending, Dispatching));
/// assert!(OutboxStatus::can_transition(OutcomeUnknown, Completed));
/// assert!(!OutboxStatus::can_transition(Pending, Completed));
/// assert!(Completed.is_terminal());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum OutboxStatus {
    /// Waiting to be claimed, now or at `next_attempt_at`.
    Pending,
    /// Claimed: somebody is about to call the remote, is calling it, or has
    /// called it and not yet settled the row.
    Dispatching,
    /// The call may have been made and its answer is not known. Never sent
    /// again by a sweep; see [`Destination`](crate::Destination) for who
    /// resolves it.
    OutcomeUnknown,
    /// The remote confirmed.
    Completed,
    /// The remote definitively refused, or the attempts ran out on a known
    /// answer.
    Failed,
}

impl OutboxStatus {
    /// All five, in the order of a row's life.
    pub const ALL: [Self; 5] = [
        Self::Pending,
        Self::Dispatching,
        Self::OutcomeUnknown,
        Self::Completed,
        Self::Failed,
    ];

    /// The text stored in the column.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Dispatching => "dispatching",
            Self::OutcomeUnknown => "outcome_unknown",
            Self::Completed => "completed",
            Self::Failed => "failed",
        }
    }

    /// Whether nothing but an operator's [`redrive`](crate::redrive) leaves
    /// this state.
    #[must_use]
    pub const fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::Failed)
    }

    /// Whether the ordinary life of a row goes from `from` to `to`.
    ///
    /// Staying where one is (a repeated settlement, a moved time) is not a
    /// transition, and an operator's [`redrive`](crate::redrive) is outside of
    /// the ordinary life: both answer `false`.
    #[must_use]
    pub const fn can_transition(from: Self, to: Self) -> bool {
        matches!(
            (from, to),
            (Self::Pending, Self::Dispatching)
                | (
                    Self::Dispatching,
                    Self::Pending | Self::OutcomeUnknown | Self::Completed | Self::Failed
                )
                | (
                    Self::OutcomeUnknown,
                    Self::Pending | Self::Completed | Self::Failed
                )
        )
    }
}

impl fmt::Display for OutboxStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The text is none of the five. There is no default: a row of unknown status
/// is never touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a status of an outbox row")]
pub struct UnknownStatus;

impl FromStr for OutboxStatus {
    type Err = UnknownStatus;

    fn from_str(text: &str) -> Result<Self, UnknownStatus> {
        Self::ALL
            .into_iter()
            .find(|status| status.as_str() == text)
            .ok_or(UnknownStatus)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_reads_back_from_its_text() {
        for status in OutboxStatus::ALL {
            assert_eq!(status.as_str().parse(), Ok(status));
        }
        assert_eq!("Pending".parse::<OutboxStatus>(), Err(UnknownStatus));
        assert_eq!("".parse::<OutboxStatus>(), Err(UnknownStatus));
    }

    #[test]
    fn the_transitions_are_exactly_those_of_the_state_machine() {
        use OutboxStatus::{Completed, Dispatching, Failed, OutcomeUnknown, Pending};
        let legal = [
            (Pending, Dispatching),
            (Dispatching, Pending),
            (Dispatching, OutcomeUnknown),
            (Dispatching, Completed),
            (Dispatching, Failed),
            (OutcomeUnknown, Pending),
            (OutcomeUnknown, Completed),
            (OutcomeUnknown, Failed),
        ];
        for from in OutboxStatus::ALL {
            for to in OutboxStatus::ALL {
                assert_eq!(
                    OutboxStatus::can_transition(from, to),
                    legal.contains(&(from, to)),
                    "{from} to {to}"
                );
            }
        }
    }
}
