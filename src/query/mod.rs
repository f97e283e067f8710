//! The transitions, one a function and each one typed statement, on a
//! `&mut PgConnection` and inside whatever transaction it is in.
//!
//! | file | transitions |
//! |---|---|
//! | `enqueue` | – → pending |
//! | `claim` | pending → dispatching, by the caller |
//! | `due`, `claim_ready`, `claim_keyed` | pending → dispatching, by the dispatcher |
//! | `settle` | dispatching, outcome_unknown → completed, failed, outcome_unknown |
//! | `requeue` | back to pending: retry, release, redrive |
//! | `read` | none |
//! | `session` | none: notifications and session locks |
//!
//! `bind` makes values for the database and `decode` reads rows one by one,
//! `fault` turns errors into [`StoreError`](crate::StoreError), and `expression`
//! holds the SQL functions and literals.

mod bind;
mod claim;
mod claim_keyed;
mod claim_ready;
mod decode;
mod due;
mod enqueue;
mod expression;
mod fault;
mod fenced;
mod lapse;
mod probe;
mod read;
mod requeue;
mod session;
mod settle;
mod transaction;

pub use crate::check::MAX_PAYLOAD_BYTES;
pub use claim::claim_due;
pub use enqueue::{EnqueueLimits, Enqueued, enqueue, enqueue_all, enqueue_once};
pub use read::{get, list_for_command};
pub use requeue::{redrive, release_expired_claims, reschedule, skip_failed};
pub use settle::{mark_completed, mark_failed, mark_outcome_unknown};

pub(crate) use claim_keyed::claim_keyed;
pub(crate) use claim_ready::claim_ready;
pub(crate) use due::{due, with_unknown};
pub(crate) use fault::{OrStoreError, Phase, connection_fault};
pub(crate) use fenced::{held, renew, settle};
pub(crate) use lapse::{lapse, stamp_unknown};
pub(crate) use probe::{answer, claim_probes, park_exhausted, resend_ripe};
pub(crate) use session::{CHANNEL, notify_on, try_lock, unlock};
pub(crate) use transaction::transaction;
