//! Checks of a store.

use std::collections::HashSet;

use chrono::{DateTime, TimeDelta, Utc};
use serde_json::{Value, json};

use crate::entry::OutboxEntry;
use crate::error::StoreError;
use crate::id::{CommandId, OutboxId};
use crate::query::Enqueued;
use crate::record::OutboxRecord;
use crate::status::OutboxStatus::{self, Completed, Dispatching, Failed, OutcomeUnknown, Pending};
use crate::store::OutboxStore;

/// One check, on a store that is empty.
pub type StoreCheck = fn(&dyn OutboxStore);

/// All checks of a store by name, for a runner of your own.
pub const STORE_CHECKS: &[(&str, StoreCheck)] = &[
    ("what is read is what was enqueued", read_back),
    ("instants are cut to microseconds", cut),
    ("a duplicate is a conflict", duplicates),
    ("a repeated request finds its row", once),
    ("all rows or none", all_or_none),
    ("an illegal record is refused by its field", illegal),
    (
        "what cannot be encoded is refused by its field",
        unencodable,
    ),
    ("the oldest due rows are claimed first", oldest_first),
    ("a limit is kept", limits),
    ("a row is claimed once", claimed_once),
    ("completing", completing),
    ("failing", failing),
    ("an unknown outcome", unknown_outcome),
    ("a retry keeps what is known", retrying),
    ("claims taken strictly before are released", releasing),
    ("an operator sends a failed row again", redriving),
    ("a row that is absent is not found", absent),
    ("a refused transition writes nothing", refusing),
    ("the rows of a command are listed oldest first", listing),
];

/// Runs [`STORE_CHECKS`], each on a store from `fresh`, which is to be empty.
///
/// # Panics
/// Where the store breaks the contract.
pub fn store<S: OutboxStore>(fresh: impl Fn() -> S) {
    for (_, check) in STORE_CHECKS {
        check(&fresh());
    }
}

const SECOND: TimeDelta = TimeDelta::seconds(1);
const INVALID: &str = crate::error::code::INVALID_RECORD;

fn start() -> DateTime<Utc> {
    // 2026-01-01T00:00:00Z
    DateTime::from_timestamp(1_767_225_600, 0).unwrap_or_default()
}

/// Row `i` is older than row `i + 1`.
fn row(i: i32) -> OutboxEntry {
    row_with(i, &json!({ "i": i }))
}

fn row_with(i: i32, payload: &Value) -> OutboxEntry {
    let entry = ok(OutboxEntry::new("a", format!("k{i}"), payload));
    entry.with_created_at(start() + SECOND * i)
}

#[track_caller]
fn ok<T>(result: Result<T, StoreError>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("a legal operation failed: {error}"),
    }
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T, StoreError>, expected: StoreError) {
    match result {
        Err(error) => assert_eq!(error, expected),
        Ok(value) => panic!("expected `{expected}`, got {value:?}"),
    }
}

/// Enqueues rows 0 to `n` and returns their ids.
fn rows(store: &dyn OutboxStore, n: i32) -> Vec<OutboxId> {
    let entries: Vec<OutboxEntry> = (0..n).map(row).collect();
    ok(store.enqueue_all(&entries));
    entries.iter().map(|entry| entry.outbox_id).collect()
}

/// A row in a state, by legal ways only. Its attempt count is 1 unless pending.
fn in_state(store: &dyn OutboxStore, i: i32, status: OutboxStatus) -> OutboxId {
    let entry = row(i);
    let id = entry.outbox_id;
    ok(store.enqueue(&entry));
    if status == Pending {
        return id;
    }
    let claimed = ok(store.claim_due(start() + SECOND * 1_000, 1, "w"));
    assert_eq!(ids(&claimed), [id], "the only row that is due");
    match status {
        Pending | Dispatching => {}
        OutcomeUnknown => ok(store.mark_outcome_unknown(id, None)),
        Completed => ok(store.mark_completed(id)),
        Failed => ok(store.mark_failed(id, "x.first", None)),
    }
    id
}

fn ids(entries: &[OutboxEntry]) -> Vec<OutboxId> {
    entries.iter().map(|entry| entry.outbox_id).collect()
}

/// What a transition may change, without the age of an unknown outcome.
fn seen(store: &dyn OutboxStore, id: OutboxId) -> OutboxRecord {
    let mut record = ok(store.get(id));
    record.unknown_for = None;
    record
}

fn status(store: &dyn OutboxStore, id: OutboxId) -> OutboxStatus {
    ok(store.get(id)).entry.status
}

fn read_back(store: &dyn OutboxStore) {
    let payloads = [
        Value::Null,
        json!("x"),
        json!([]),
        json!({}),
        json!({ "": "" }),
        json!("\u{1f600} \u{ffff}"),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(0.1),
        json!({ "a": [1, { "b": null }], "é": true }),
    ];
    for (i, payload) in (0..).zip(&payloads) {
        let entry = row_with(i, payload)
            .caused_by(CommandId::new())
            .header("content-type", "application/json")
            .ordering_key("key")
            .not_before(start() + SECOND);
        ok(store.enqueue(&entry));
        let record = ok(store.get(entry.outbox_id));
        assert_eq!(record.entry, entry);
        assert_eq!(&record.entry.payload, payload);
        assert_eq!((record.claim, record.last_failure), (None, None));
        assert_eq!((record.probe_count, record.lapse_count), (0, 0));
    }
}

fn cut(store: &dyn OutboxStore) {
    let nanos = |n| start() + TimeDelta::nanoseconds(n);
    let mut entry = row(1);
    entry.created_at = nanos(123_456_789);
    entry.next_attempt_at = Some(nanos(999_999_999));
    ok(store.enqueue(&entry));
    let stored = ok(store.get(entry.outbox_id)).entry;
    assert_eq!(stored.created_at, nanos(123_456_000), "cut, not rounded");
    assert_eq!(stored.next_attempt_at, Some(nanos(999_999_000)));
}

fn duplicates(store: &dyn OutboxStore) {
    let first = row(1);
    ok(store.enqueue(&first));
    refused(
        store.enqueue(&row(2).with_id(first.outbox_id)),
        StoreError::Conflict,
    );
    refused(store.enqueue(&row(1)), StoreError::Conflict);
    let elsewhere = ok(OutboxEntry::new("b", "k1", &json!({})));
    ok(store.enqueue(&elsewhere));
    assert_eq!(ok(store.get(first.outbox_id)).entry, first);
}

fn once(store: &dyn OutboxStore) {
    let first = row(1);
    assert_eq!(ok(store.enqueue_once(&first)), Enqueued::New);
    let duplicate = |same_payload| Enqueued::Duplicate {
        outbox_id: first.outbox_id,
        same_payload,
    };
    assert_eq!(ok(store.enqueue_once(&row(1))), duplicate(true));
    let other = row_with(1, &json!({ "i": "other" }));
    assert_eq!(ok(store.enqueue_once(&other)), duplicate(false));
    refused(
        store.enqueue_once(&row(2).with_id(first.outbox_id)),
        StoreError::Conflict,
    );
}

fn all_or_none(store: &dyn OutboxStore) {
    let (first, taken) = (row(1), row(2));
    ok(store.enqueue(&taken));
    refused(
        store.enqueue_all(&[first.clone(), row(2)]),
        StoreError::Conflict,
    );
    refused(store.get(first.outbox_id), StoreError::NotFound);
    let twice = row(3);
    refused(
        store.enqueue_all(&[twice.clone(), twice.clone()]),
        StoreError::Conflict,
    );
    refused(store.get(twice.outbox_id), StoreError::NotFound);
    ok(store.enqueue_all(&[]));
}

fn illegal(store: &dyn OutboxStore) {
    let refuse = |field, change: &dyn Fn(&mut OutboxEntry)| {
        let mut entry = row(1);
        change(&mut entry);
        let expected = StoreError::Other {
            code: INVALID,
            field: Some(field),
        };
        refused(store.enqueue(&entry), expected);
        refused(store.enqueue_once(&entry), expected);
        refused(store.enqueue_all(&[row(2), entry.clone()]), expected);
        refused(store.get(entry.outbox_id), StoreError::NotFound);
    };
    for status in [Dispatching, OutcomeUnknown, Completed, Failed] {
        refuse("status", &|entry| entry.status = status);
    }
    refuse("attempt_count", &|entry| {
        entry.attempt_count = i32::MAX.cast_unsigned() + 1;
    });
    refuse("destination", &|entry| entry.destination.clear());
    refuse("destination", &|entry| entry.destination = "d".repeat(256));
    refuse("idempotency_key", &|entry| entry.idempotency_key.clear());
    refuse("idempotency_key", &|entry| {
        entry.idempotency_key = "k".repeat(1_025);
    });
    refuse("ordering_key", &|entry| {
        entry.ordering_key = Some(String::new());
    });
    refuse("payload", &|entry| {
        entry.payload = json!("x".repeat(1 << 20));
    });
}

fn unencodable(store: &dyn OutboxStore) {
    let field = |field| StoreError::Serialization { field: Some(field) };
    let refuse = |name, change: &dyn Fn(&mut OutboxEntry)| {
        let mut entry = row(1);
        change(&mut entry);
        refused(store.enqueue(&entry), field(name));
        refused(store.get(entry.outbox_id), StoreError::NotFound);
    };
    refuse("payload", &|e| e.payload = json!({ "a": ["\0"] }));
    refuse("payload", &|e| e.payload = json!({ "\0": 1 }));
    refuse("destination", &|e| e.destination = "a\0".to_owned());
    refuse("idempotency_key", &|e| e.idempotency_key = "\0".to_owned());
    refuse("created_at", &|e| e.created_at = DateTime::<Utc>::MIN_UTC);
    let id = in_state(store, 1, Dispatching);
    let before = seen(store, id);
    refused(store.mark_failed(id, "\0", None), field("reason"));
    refused(
        store.mark_outcome_unknown(id, Some("\0")),
        field("remote_ref"),
    );
    refused(store.claim_due(start(), 1, "w\0"), field("worker_id"));
    assert_eq!(seen(store, id), before);
}

fn oldest_first(store: &dyn OutboxStore) {
    let later = start() + SECOND * 500;
    let undue = ok(OutboxEntry::new("a", "undue", &json!({})))
        .with_created_at(start() - SECOND)
        .not_before(later + SECOND);
    ok(store.enqueue(&undue));
    // Enqueued youngest first; two of one instant are told apart by their ids.
    let mut entries: Vec<OutboxEntry> = (0..4).map(row).collect();
    entries.push(row(4).with_created_at(start()));
    for entry in entries.iter().rev() {
        ok(store.enqueue(entry));
    }
    entries.sort_by_key(|entry| (entry.created_at, entry.outbox_id));
    let claimed = ok(store.claim_due(later, 3, "w"));
    assert_eq!(ids(&claimed), ids(&entries[..3]));
    for entry in &claimed {
        assert_eq!((entry.status, entry.attempt_count), (Dispatching, 1));
        let record = ok(store.get(entry.outbox_id));
        let claim = record
            .claim
            .map(|claim| (claim.worker_id, claim.claimed_at));
        assert_eq!(claim, Some(("w".to_owned(), later)));
    }
    let rest = ok(store.claim_due(later, 10, "w"));
    assert_eq!(
        ids(&rest),
        ids(&entries[3..]),
        "the undue row is no part of it"
    );
    assert_eq!(ok(store.get(undue.outbox_id)).entry, undue);
    let due = ok(store.claim_due(later + SECOND, 10, "w"));
    assert_eq!(ids(&due), [undue.outbox_id], "due at the instant itself");
}

fn limits(store: &dyn OutboxStore) {
    let three = rows(store, 3);
    let now = start() + SECOND * 100;
    assert_eq!(ok(store.claim_due(now, 0, "w")), []);
    assert_eq!(status(store, three[0]), Pending);
    assert_eq!(ids(&ok(store.claim_due(now, usize::MAX, "w"))), three);
    // A row at the end of its counter is passed over.
    let mut spent = row(10);
    spent.attempt_count = i32::MAX.cast_unsigned();
    ok(store.enqueue(&spent));
    assert_eq!(ok(store.claim_due(now, 10, "w")), []);
}

fn claimed_once(store: &dyn OutboxStore) {
    const WORKERS: usize = 4;
    let expected: HashSet<OutboxId> = rows(store, 100).into_iter().collect();
    let now = start() + SECOND * 1_000;
    let batches: Vec<Vec<OutboxId>> = std::thread::scope(|scope| {
        let work = |w: usize| {
            let mut mine = Vec::new();
            loop {
                let batch = ok(store.claim_due(now, 7, &format!("w{w}")));
                if batch.is_empty() {
                    return mine;
                }
                mine.extend(ids(&batch));
            }
        };
        let threads: Vec<_> = (0..WORKERS).map(|w| scope.spawn(move || work(w))).collect();
        threads
            .into_iter()
            .map(|thread| match thread.join() {
                Ok(mine) => mine,
                Err(panic) => std::panic::resume_unwind(panic),
            })
            .collect()
    });
    let all: Vec<OutboxId> = batches.concat();
    assert_eq!(all.len(), 100, "each row once");
    assert_eq!(all.into_iter().collect::<HashSet<_>>(), expected);
}

fn completing(store: &dyn OutboxStore) {
    for (i, from) in (0..).zip([Dispatching, OutcomeUnknown]) {
        let id = in_state(store, i, from);
        ok(store.mark_completed(id));
        let first = seen(store, id);
        assert_eq!(first.entry.status, Completed);
        assert!(first.entry.completed_at.is_some());
        assert_eq!(first.claim, None);
        ok(store.mark_completed(id));
        assert_eq!(seen(store, id), first, "repeated, it changes nothing");
    }
    for (i, from) in (10..).zip([Pending, Failed]) {
        let id = in_state(store, i, from);
        refused(store.mark_completed(id), StoreError::Conflict);
        // Out of the way of the next.
        if from == Pending {
            ok(store.claim_due(start() + SECOND * 1_000, 1, "w"));
        }
    }
}

fn failing(store: &dyn OutboxStore) {
    for (i, from) in (0..).zip([Dispatching, OutcomeUnknown]) {
        let id = in_state(store, i, from);
        ok(store.mark_failed(id, "x.one", None));
        let first = seen(store, id);
        assert_eq!(first.entry.status, Failed);
        assert_eq!(first.last_failure.as_deref(), Some("x.one"));
        assert_eq!(first.claim, None);
        ok(store.mark_failed(id, "x.two", None));
        let second = seen(store, id);
        assert_eq!(second.last_failure.as_deref(), Some("x.two"));
        assert_eq!(second.entry, first.entry, "the time stays the first");
        ok(store.skip_failed(id));
    }
    let completed = in_state(store, 10, Completed);
    refused(
        store.mark_failed(completed, "x", None),
        StoreError::Conflict,
    );
    refused(store.skip_failed(completed), StoreError::Conflict);
    let pending = in_state(store, 11, Pending);
    refused(store.mark_failed(pending, "x", None), StoreError::Conflict);
}

fn unknown_outcome(store: &dyn OutboxStore) {
    let id = in_state(store, 0, Dispatching);
    ok(store.mark_outcome_unknown(id, None));
    let record = ok(store.get(id));
    assert_eq!((record.entry.status, record.claim), (OutcomeUnknown, None));
    assert!(record.unknown_since.is_some() && record.unknown_for.is_some());
    ok(store.mark_outcome_unknown(id, Some("r1")));
    ok(store.mark_outcome_unknown(id, Some("r2")));
    let filled = ok(store.get(id));
    assert_eq!(filled.remote_ref.as_deref(), Some("r1"), "never replaced");
    assert_eq!(filled.unknown_since, record.unknown_since);
    for (i, from) in (10..).zip([Completed, Failed, Pending]) {
        let id = in_state(store, i, from);
        refused(store.mark_outcome_unknown(id, None), StoreError::Conflict);
    }
}

fn retrying(store: &dyn OutboxStore) {
    let at = start() + SECOND * 5_000;
    let id = in_state(store, 0, OutcomeUnknown);
    ok(store.mark_outcome_unknown(id, Some("r")));
    ok(store.mark_failed(id, "x.busy", Some(at)));
    let record = ok(store.get(id));
    assert_eq!(
        (record.entry.status, record.entry.attempt_count),
        (Pending, 1)
    );
    assert_eq!(record.entry.next_attempt_at, Some(at));
    assert_eq!(record.last_failure.as_deref(), Some("x.busy"));
    assert_eq!((record.unknown_since, record.claim), (None, None));
    // From pending only the time moves.
    ok(store.reschedule(id, at + SECOND));
    let moved = ok(store.get(id));
    assert_eq!(moved.entry.next_attempt_at, Some(at + SECOND));
    assert_eq!(moved.last_failure.as_deref(), Some("x.busy"));
    assert_eq!(moved.remote_ref.as_deref(), Some("r"));
    for (i, from) in (10..).zip([Completed, Failed]) {
        let id = in_state(store, i, from);
        refused(store.reschedule(id, at), StoreError::Conflict);
        refused(store.mark_failed(id, "x", Some(at)), StoreError::Conflict);
    }
}

fn releasing(store: &dyn OutboxStore) {
    let at = |micros| start() + SECOND * 1_000 + TimeDelta::microseconds(micros);
    let four = rows(store, 4);
    for taken in [-1, -1, 0, 1] {
        assert_eq!(ok(store.claim_due(at(taken), 1, "w")).len(), 1);
    }
    let mut older = four[..2].to_vec();
    older.sort_unstable();
    assert_eq!(ok(store.release_expired_claims(at(0))), older);
    for id in &four[..2] {
        let record = ok(store.get(*id));
        assert_eq!((record.entry.status, record.claim), (Pending, None));
        assert_eq!(record.entry.next_attempt_at, None);
        assert_eq!(record.entry.attempt_count, 1);
    }
    for id in &four[2..] {
        assert_eq!(status(store, *id), Dispatching);
    }
    assert_eq!(ok(store.release_expired_claims(at(0))), []);
}

fn redriving(store: &dyn OutboxStore) {
    let id = in_state(store, 0, Failed);
    ok(store.redrive(id));
    let record = ok(store.get(id));
    assert_eq!(
        (record.entry.status, record.entry.attempt_count),
        (Pending, 0)
    );
    assert_eq!(
        (record.entry.next_attempt_at, record.entry.completed_at),
        (None, None)
    );
    assert_eq!(record.last_failure.as_deref(), Some("x.first"));
    refused(store.redrive(id), StoreError::Conflict);
    ok(store.claim_due(start() + SECOND * 1_000, 1, "w"));
    refused(store.redrive(id), StoreError::Conflict);
    ok(store.mark_completed(id));
    refused(store.redrive(id), StoreError::Conflict);
}

fn absent(store: &dyn OutboxStore) {
    let id = OutboxId::new();
    let gone = StoreError::NotFound;
    refused(store.get(id), gone);
    refused(store.mark_completed(id), gone);
    refused(store.mark_failed(id, "x", None), gone);
    refused(store.mark_failed(id, "x", Some(start())), gone);
    refused(store.mark_outcome_unknown(id, None), gone);
    refused(store.reschedule(id, start()), gone);
    refused(store.redrive(id), gone);
    refused(store.skip_failed(id), gone);
    assert_eq!(ok(store.list_for_command(CommandId::new())), []);
}

fn refusing(store: &dyn OutboxStore) {
    for (i, from) in (0..).zip([Completed, Failed]) {
        let id = in_state(store, i, from);
        let before = seen(store, id);
        refused(store.reschedule(id, start()), StoreError::Conflict);
        refused(
            store.mark_outcome_unknown(id, Some("r")),
            StoreError::Conflict,
        );
        match from {
            Completed => refused(store.mark_failed(id, "x", None), StoreError::Conflict),
            _ => refused(store.mark_completed(id), StoreError::Conflict),
        }
        assert_eq!(seen(store, id), before);
    }
}

fn listing(store: &dyn OutboxStore) {
    let command = CommandId::new();
    let mut entries: Vec<OutboxEntry> = [3, 1, 2]
        .into_iter()
        .map(|i| row(i).caused_by(command))
        .collect();
    ok(store.enqueue_all(&entries));
    ok(store.enqueue(&row(9)));
    entries.sort_by_key(|entry| (entry.created_at, entry.outbox_id));
    let listed: Vec<OutboxEntry> = ok(store.list_for_command(command))
        .into_iter()
        .map(|record| record.entry)
        .collect();
    assert_eq!(listed, entries);
}
