//! A transactional outbox for synchronous services.

mod backoff;
mod dispatcher;
mod entry;
mod error;
mod id;
#[cfg(feature = "migrations")]
pub mod migrations;
mod postgres;
pub mod query;
mod record;
#[allow(missing_docs, unreachable_pub)]
pub mod schema;
mod sender;
mod status;
mod store;

pub use backoff::Backoff;
pub use dispatcher::{
    ConfigError, Destination, Dispatcher, DispatcherBuilder, DispatcherHandle, Stats, StopReport,
};
pub use entry::OutboxEntry;
pub use error::{StoreError, code};
pub use id::{CommandId, OutboxId};
pub use query::{
    Enqueued, claim_due, enqueue, enqueue_all, enqueue_once, get, list_for_command, mark_completed,
    mark_failed, mark_outcome_unknown, redrive, release_expired_claims, reschedule,
};
pub use record::{OutboxClaim, OutboxRecord};
pub use sender::{Dispatched, OutboxReconciler, OutboxSender, Reconciled};
pub use status::{OutboxStatus, UnknownStatus};
pub use store::{OutboxReader, OutboxStore, OutboxWriter, PgOutbox, PgOutboxBuilder};
