//! A transactional outbox for synchronous Rust services, on PostgreSQL with
//! Diesel.
//!
//! A service that changes its own tables and must also cause an effect somewhere
//! else (charge a card, call an airline) cannot do both in one transaction. So
//! it writes a *row that says what is to be done* in the same transaction as its
//! own change, and a [`Dispatcher`] carries it out afterwards: claims the row,
//! calls the remote system, and settles the row with what happened.
//!
//! The hard part is honesty about what happened. A request that left and got no
//! answer is neither done nor undone: it is **unknown**, and to send it again may
//! charge the card twice. Here that is a state of its own,
//! [`OutboxStatus::OutcomeUnknown`], and what becomes of it is the choice of each
//! [`Destination`].
//!
//! # Enqueue, inside your transaction
//!
//! ```no_run
//! use diesel::prelude::*;
//! use diesel_outbox::{OutboxEntry, StoreError, enqueue};
//! use serde_json::json;
//!
//! #[derive(Debug)]
//! enum Failure { Outbox(StoreError), Database(diesel::result::Error) }
//! impl From<StoreError> for Failure {
//!     fn from(e: StoreError) -> Self { Self::Outbox(e) }
//! }
//! impl From<diesel::result::Error> for Failure {
//!     fn from(e: diesel::result::Error) -> Self { Self::Database(e) }
//! }
//!
//! fn place_order(conn: &mut PgConnection, order: i64) -> Result<(), Failure> {
//!     conn.transaction(|conn| {
//!         // … insert the order …
//!         let charge = OutboxEntry::new("payments", format!("order-{order}"), &json!({ "cents": 4200 }))?;
//!         enqueue(conn, &charge)?; // an error must fail the closure
//!         Ok(())
//!     })
//! }
//! # let _ = place_order;
//! ```
//!
//! # Dispatch, in the background
//!
//! ```no_run
//! use std::time::Duration;
//! use diesel_outbox::{Destination, Dispatched, Dispatcher, OutboxEntry};
//!
//! fn charge(entry: &OutboxEntry) -> Dispatched {
//!     // Call the remote with entry.payload and entry.idempotency_key, then say
//!     // which of the four it was.
//!     Dispatched::completed()
//! }
//!
//! let dispatcher = Dispatcher::builder("postgres://localhost/shop")
//!     .destination(Destination::idempotent("payments", charge))
//!     .start()?;
//! // …
//! dispatcher.stop(Duration::from_secs(10));
//! # Ok::<(), diesel_outbox::ConfigError>(())
//! ```
//!
//! # The map
//!
//! | to … | see |
//! |---|---|
//! | learn it from the beginning | [the tutorial](guide::tutorial) |
//! | know what a dispatcher does when something fails | [its page](guide::dispatcher) |
//! | migrate a table that holds millions of rows | [a filled table](guide::filled_table) |
//! | enqueue in your own transaction | [`enqueue`], [`enqueue_once`], [`enqueue_all`], [`OutboxEntry`], [`EnqueueLimits`] |
//! | call the remote | [`OutboxSender`], [`Dispatched`] |
//! | ask about unknown outcomes | [`OutboxReconciler`], [`Reconciled`] |
//! | run the dispatcher | [`Dispatcher`], [`Destination`], [`Backoff`] |
//! | act as an operator | [`get`], [`list_for_command`], [`mark_completed`], [`mark_failed`], [`reschedule`], [`redrive`], [`skip_failed`] |
//! | drive the outbox by hand | [`PgOutbox`], [`OutboxReader`], [`OutboxWriter`] |
//! | test an application without a database | [`MemoryOutbox`], [`FakeClock`], [`conformance`] |
//! | understand an error | [`StoreError`] |
//!
//! # What is promised
//!
//! * A committed row is never lost, and nothing rolled back is ever sent.
//! * No row is held by two claims at once; a settlement is fenced by its claim.
//! * An unknown outcome is never sent again by a sweep: only a reconciler that is
//!   certain, or an operator, puts it back.
//! * No transaction and no pooled connection is held while a sender runs.
//! * One bad row (poison payload, panic, hang) never stops the others.
//! * Payloads, keys and connection strings reach no log, error or `Debug`.
//!
//! With a host built with `panic = "abort"` a sender that panics ends the
//! process; the row's claim then lapses like that of any process that died.
//!
//! # Sharing the table
//!
//! `tf_outbox` is the table of the async crate `turnframe-store-postgres` too,
//! and both can work on it at once. Three things nobody can promise for our rows
//! then: its sweep may put back a row of ours if its cut-off is shorter than our
//! renewals, it settles by id without a fence, and it ignores destinations.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod backoff;
mod check;
mod claim;
pub mod conformance;
mod dispatcher;
mod entry;
mod error;
pub mod guide;
mod id;
mod memory;
#[cfg(feature = "migrations")]
pub mod migrations;
mod postgres;
mod probe;
pub mod query;
mod record;
// Written by the diesel CLI.
#[allow(missing_docs, unreachable_pub)]
pub mod schema;
mod sender;
mod status;
mod store;
#[cfg(feature = "turnframe")]
pub mod turnframe;

pub use backoff::Backoff;
pub use claim::KeyPolicy;
pub use dispatcher::{
    ConfigError, Destination, DestinationState, Dispatcher, DispatcherBuilder, DispatcherHandle,
    Pause, Route, Stats, StopReport,
};
pub use entry::OutboxEntry;
pub use error::{StoreError, code};
pub use id::{CommandId, OutboxId};
pub use memory::{FakeClock, MemoryOutbox};
pub use query::{
    EnqueueLimits, Enqueued, claim_due, enqueue, enqueue_all, enqueue_once, get, list_for_command,
    mark_completed, mark_failed, mark_outcome_unknown, redrive, release_expired_claims, reschedule,
    skip_failed,
};
pub use record::{OutboxClaim, OutboxRecord};
pub use sender::{Dispatched, OutboxReconciler, OutboxSender, Reconciled};
pub use status::{OutboxStatus, UnknownStatus};
pub use store::{OutboxReader, OutboxStore, OutboxWriter, PgOutbox, PgOutboxBuilder};

/// The README's examples are compiled with the tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
