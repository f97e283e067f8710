//! Checks of what an application implements.

use crate::entry::OutboxEntry;
use crate::error::code;
use crate::memory::MemoryOutbox;
use crate::record::OutboxRecord;
use crate::sender::{Dispatched, OutboxReconciler, OutboxSender, Reconciled};
use crate::store::{OutboxReader, OutboxWriter};

const THREADS: usize = 4;

/// A key that no other run has used: the remote may remember.
fn fresh_key() -> String {
    format!("conformance-{}", uuid::Uuid::new_v4())
}

#[track_caller]
fn is_storable(answer: &Dispatched) {
    match answer {
        Dispatched::Retryable { code, .. } | Dispatched::Permanent { code } => assert!(
            code::is_stable(code),
            "a reason is a stable code, 1 to 100 of A-Z a-z 0-9 . _ -"
        ),
        Dispatched::Completed { remote_ref } | Dispatched::Unknown { remote_ref } => assert!(
            remote_ref
                .as_ref()
                .is_none_or(|text| text.len() <= 1024 && !text.contains('\0')),
            "a remote reference is up to 1,024 bytes without a NUL"
        ),
    }
}

/// The entry as a sender gets it in its `attempt`th attempt.
fn attempt(entry: &impl Fn(&str) -> OutboxEntry, key: &str, attempt: u32) -> OutboxEntry {
    let mut entry = entry(key);
    assert_eq!(entry.idempotency_key, key, "the key is the one asked for");
    entry.attempt_count = attempt;
    entry
}

/// Checks that whatever `sender` answers can be stored, and that it can be called by
/// several threads at once. `entry` makes a row of the key that it is given; each
/// key is used once.
///
/// # Panics
/// Where the sender breaks the contract, or panics itself.
pub fn sender(sender: &dyn OutboxSender, entry: &(impl Fn(&str) -> OutboxEntry + Sync)) {
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for _ in 0..3 {
                    is_storable(&sender.send(&attempt(entry, &fresh_key(), 1)));
                }
            });
        }
    });
}

/// Checks what [`Destination::idempotent`](crate::Destination::idempotent) relies
/// on: that the key reaches the remote with every attempt, and that the remote does
/// nothing twice for it. `effects` counts what the remote has done for a key.
///
/// # Panics
/// Where a key has had no effect or several, or the sender panics itself.
pub fn idempotent_sender(
    sender: &dyn OutboxSender,
    entry: &(impl Fn(&str) -> OutboxEntry + Sync),
    effects: &impl Fn(&str) -> usize,
) {
    let (one, other) = (fresh_key(), fresh_key());
    for n in 1..=3 {
        let answer = sender.send(&attempt(entry, &one, n));
        is_storable(&answer);
        assert!(
            !matches!(answer, Dispatched::Permanent { .. }),
            "attempt {n} of one row is refused for good: a repetition is no fault"
        );
    }
    assert_eq!(effects(&one), 1, "one effect of three attempts in a row");
    std::thread::scope(|scope| {
        for n in 1..=4 {
            let entry = attempt(entry, &other, n);
            scope.spawn(move || is_storable(&sender.send(&entry)));
        }
    });
    assert_eq!(effects(&other), 1, "one effect of four attempts at once");
    assert_eq!(effects(&one), 1, "another key is another effect");
}

/// Checks that `reconciler` tells what the remote has from what it never had:
/// [`Completed`](Reconciled::Completed) for a row that `sender` has sent, and
/// anything else for one that it has not.
///
/// # Panics
/// Where it claims what is not so, or gives a reason that is no stable code.
pub fn reconciler(
    reconciler: &dyn OutboxReconciler,
    sender: &dyn OutboxSender,
    entry: &impl Fn(&str) -> OutboxEntry,
) {
    let (sent, never) = (fresh_key(), fresh_key());
    let answer = sender.send(&attempt(entry, &sent, 1));
    assert!(
        matches!(answer, Dispatched::Completed { .. }),
        "the sender has to work for this check"
    );
    let found = reconciler.reconcile(&unknown(&attempt(entry, &sent, 0)));
    assert_eq!(found, Reconciled::Completed, "the remote has it");
    let found = reconciler.reconcile(&unknown(&attempt(entry, &never, 0)));
    assert_ne!(found, Reconciled::Completed, "the remote never had it");
    if let Reconciled::Failed { code } = found {
        assert!(code::is_stable(&code), "a reason is a stable code");
    }
}

/// The row as a reconciler gets it.
fn unknown(entry: &OutboxEntry) -> OutboxRecord {
    let outbox = MemoryOutbox::new();
    let id = entry.outbox_id;
    let record = outbox
        .enqueue(entry)
        .and_then(|()| outbox.claim_due(chrono::Utc::now(), 1, "conformance"))
        .and_then(|_| outbox.mark_outcome_unknown(id, None))
        .and_then(|()| outbox.get(id));
    match record {
        Ok(record) => record,
        Err(error) => panic!("the entry is to be a legal one, due now: {error}"),
    }
}
