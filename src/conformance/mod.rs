//! The contract as checks that anyone can run: on a store, a sender or a
//! reconciler of their own.
//!
//! Each check panics where the contract is broken, and says how, so that it is an
//! ordinary test:
//!
//! ```
//! use diesel_outbox::{MemoryOutbox, conformance};
//!
//! conformance::store(MemoryOutbox::new);
//! ```
//!
//! A sender is checked against the remote's own sandbox, or whatever stands in for
//! it in your tests, and told how to count effects there:
//!
//! ```
//! use std::collections::HashSet;
//! use std::sync::Mutex;
//! use diesel_outbox::{Dispatched, OutboxEntry, conformance};
//!
//! let remote: Mutex<HashSet<String>> = Mutex::default();
//! let send = |entry: &OutboxEntry| {
//!     remote.lock().unwrap().insert(entry.idempotency_key.clone());
//!     Dispatched::completed()
//! };
//! let entry = |key: &str| OutboxEntry::new("payments", key, &"a charge").unwrap();
//! let effects = |key: &str| usize::from(remote.lock().unwrap().contains(key));
//! conformance::sender(&send, &entry);
//! conformance::idempotent_sender(&send, &entry, &effects);
//! ```

mod sender;
mod store;

pub use sender::{idempotent_sender, reconciler, sender};
pub use store::{STORE_CHECKS, StoreCheck, store};
