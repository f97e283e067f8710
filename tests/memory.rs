//! The outbox in memory is the outbox in PostgreSQL: the same checks, and the same
//! dispatcher with the same ends, on both.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use crossbeam_channel::unbounded;
use diesel_outbox::conformance::{self, STORE_CHECKS};
use diesel_outbox::{
    Backoff, CommandId, Destination, Dispatched, Dispatcher, DispatcherBuilder, Enqueued,
    FakeClock, KeyPolicy, MemoryOutbox, OutboxEntry, OutboxId, OutboxReader, OutboxRecord,
    OutboxStatus, OutboxStore, OutboxWriter, PgOutbox, Reconciled, StoreError,
};
use serde_json::json;
use support::db::TestDb;
use support::dispatch::{SOON, gated, i_of, ms};
use support::wait::{eventually, stretched};

const HOUR: Duration = Duration::from_secs(3600);

// ---------------------------------------------------------------- the contract

#[test]
fn the_store_in_memory_keeps_the_contract() {
    conformance::store(MemoryOutbox::new);
}

#[test]
fn the_store_in_postgresql_keeps_the_contract() {
    for (name, check) in STORE_CHECKS {
        let db = TestDb::new();
        let outbox = PgOutbox::builder(db.url()).build().unwrap();
        let kept = catch_unwind(AssertUnwindSafe(|| check(&outbox)));
        assert!(kept.is_ok(), "{name}");
    }
}

/// A store with one fault.
struct Faulty {
    outbox: MemoryOutbox,
    fault: &'static str,
}

impl OutboxReader for Faulty {
    fn get(&self, id: OutboxId) -> Result<OutboxRecord, StoreError> {
        self.outbox.get(id)
    }
    fn list_for_command(&self, command: CommandId) -> Result<Vec<OutboxRecord>, StoreError> {
        let mut rows = self.outbox.list_for_command(command)?;
        if self.fault == "lists in the order of ids" {
            rows.sort_by_key(|row| std::cmp::Reverse(row.entry.created_at));
        }
        Ok(rows)
    }
}

impl OutboxWriter for Faulty {
    fn enqueue(&self, entry: &OutboxEntry) -> Result<(), StoreError> {
        let mut entry = entry.clone();
        if self.fault == "enqueues what is settled" {
            entry.status = OutboxStatus::Pending;
        }
        self.outbox.enqueue(&entry)
    }
    fn enqueue_once(&self, entry: &OutboxEntry) -> Result<Enqueued, StoreError> {
        self.outbox.enqueue_once(entry)
    }
    fn enqueue_all(&self, entries: &[OutboxEntry]) -> Result<(), StoreError> {
        if self.fault == "enqueues some of all" {
            return entries
                .iter()
                .try_for_each(|entry| self.outbox.enqueue(entry));
        }
        self.outbox.enqueue_all(entries)
    }
    fn claim_due(
        &self,
        at: DateTime<Utc>,
        limit: usize,
        worker: &str,
    ) -> Result<Vec<OutboxEntry>, StoreError> {
        match self.fault {
            "claims one too many" => self.outbox.claim_due(at, limit.saturating_add(1), worker),
            "claims before the time" => self.outbox.claim_due(at + HOUR, limit, worker),
            _ => self.outbox.claim_due(at, limit, worker),
        }
    }
    fn mark_completed(&self, id: OutboxId) -> Result<(), StoreError> {
        match self.fault {
            "completes what nobody sent" => self.outbox.mark_completed(id).or(Ok(())),
            _ => self.outbox.mark_completed(id),
        }
    }
    fn mark_failed(
        &self,
        id: OutboxId,
        reason: &str,
        retry_at: Option<DateTime<Utc>>,
    ) -> Result<(), StoreError> {
        match self.fault {
            "forgets the last reason" if retry_at.is_none() => {
                let known = self.outbox.get(id)?.last_failure;
                self.outbox
                    .mark_failed(id, known.as_deref().unwrap_or(reason), None)
            }
            _ => self.outbox.mark_failed(id, reason, retry_at),
        }
    }
    fn mark_outcome_unknown(&self, id: OutboxId, at: Option<&str>) -> Result<(), StoreError> {
        self.outbox.mark_outcome_unknown(id, at)
    }
    fn reschedule(&self, id: OutboxId, at: DateTime<Utc>) -> Result<(), StoreError> {
        match self.fault {
            "sends again what is done" => self.outbox.reschedule(id, at).or(Ok(())),
            _ => self.outbox.reschedule(id, at),
        }
    }
    fn release_expired_claims(&self, before: DateTime<Utc>) -> Result<Vec<OutboxId>, StoreError> {
        match self.fault {
            "releases at the instant itself" => self
                .outbox
                .release_expired_claims(before + Duration::from_micros(1)),
            _ => self.outbox.release_expired_claims(before),
        }
    }
    fn redrive(&self, id: OutboxId) -> Result<(), StoreError> {
        self.outbox.redrive(id)
    }
    fn skip_failed(&self, id: OutboxId) -> Result<(), StoreError> {
        self.outbox.skip_failed(id)
    }
}

#[test]
fn the_suite_sees_what_is_wrong_with_a_store() {
    let passes = |fault| {
        let fresh = || Faulty {
            outbox: MemoryOutbox::new(),
            fault,
        };
        catch_unwind(AssertUnwindSafe(|| conformance::store(fresh))).is_ok()
    };
    assert!(passes("none"));
    for fault in [
        "lists in the order of ids",
        "enqueues what is settled",
        "enqueues some of all",
        "claims one too many",
        "claims before the time",
        "completes what nobody sent",
        "forgets the last reason",
        "sends again what is done",
        "releases at the instant itself",
    ] {
        assert!(!passes(fault), "a store that {fault} passed");
    }
}

#[test]
fn the_suite_sees_what_is_wrong_with_a_sender() {
    let remote: Mutex<HashMap<String, usize>> = Mutex::default();
    let apply = |key: &str| *remote.lock().unwrap().entry(key.to_owned()).or_default() += 1;
    let effects = |key: &str| remote.lock().unwrap().get(key).copied().unwrap_or(0);
    let entry = |key: &str| OutboxEntry::new("a", key, &json!({})).unwrap();
    let passes = |send: &(dyn Fn(&OutboxEntry) -> Dispatched + Sync)| {
        let send = |entry: &OutboxEntry| send(entry);
        catch_unwind(AssertUnwindSafe(|| {
            conformance::sender(&send, &entry);
            conformance::idempotent_sender(&send, &entry, &effects);
        }))
        .is_ok()
    };
    let honest = |entry: &OutboxEntry| {
        remote
            .lock()
            .unwrap()
            .entry(entry.idempotency_key.clone())
            .or_insert(1);
        Dispatched::completed()
    };
    assert!(passes(&honest));
    assert!(!passes(&|entry| {
        apply(&entry.idempotency_key);
        Dispatched::completed()
    }));
    assert!(!passes(&|entry| {
        apply(&format!(
            "{}-{}",
            entry.idempotency_key, entry.attempt_count
        ));
        Dispatched::completed()
    }));
    assert!(!passes(&|entry| match entry.attempt_count {
        1 => honest(entry),
        _ => Dispatched::permanent("x.duplicate"),
    }));
    assert!(!passes(&|entry| {
        honest(entry);
        Dispatched::retryable("free text, with a card number")
    }));

    let knows = |record: &OutboxRecord| match effects(&record.entry.idempotency_key) {
        0 => Reconciled::Resend,
        _ => Reconciled::Completed,
    };
    conformance::reconciler(&knows, &honest, &entry);
    let guesses = |_: &OutboxRecord| Reconciled::Completed;
    let caught = catch_unwind(AssertUnwindSafe(|| {
        conformance::reconciler(&guesses, &honest, &entry);
    }));
    assert!(caught.is_err(), "a reconciler that guesses passed");
}

// -------------------------------------------------------------- the dispatcher

/// An outbox and dispatchers on it, in memory or in a database.
struct Ground {
    store: Box<dyn OutboxStore>,
    dispatcher: Box<dyn Fn() -> DispatcherBuilder>,
    _db: Option<TestDb>,
}

fn grounds() -> [(&'static str, Ground); 2] {
    let outbox = MemoryOutbox::new();
    let db = TestDb::new();
    let url = db.url().to_owned();
    let in_memory = Ground {
        store: Box::new(outbox.clone()),
        dispatcher: Box::new(move || Dispatcher::in_memory(&outbox)),
        _db: None,
    };
    let in_postgresql = Ground {
        store: Box::new(PgOutbox::builder(&url).build().unwrap()),
        dispatcher: Box::new(move || Dispatcher::builder(&url)),
        _db: Some(db),
    };
    [("memory", in_memory), ("postgresql", in_postgresql)]
}

impl Ground {
    fn dispatcher(&self, destination: Destination) -> DispatcherBuilder {
        (self.dispatcher)()
            .with_maintenance_interval(ms(50))
            .destination(destination)
    }

    fn enqueued(&self, n: u64) -> Vec<OutboxId> {
        let rows: Vec<OutboxEntry> = (1..=n)
            .map(|i| OutboxEntry::new("a", format!("k{i}"), &json!({ "i": i })).unwrap())
            .collect();
        self.store.enqueue_all(&rows).unwrap();
        rows.iter().map(|row| row.outbox_id).collect()
    }

    fn until(&self, id: OutboxId, status: OutboxStatus) -> OutboxRecord {
        eventually(SOON, status.as_str(), || {
            let record = self.store.get(id).unwrap();
            (record.entry.status == status).then_some(record)
        })
    }
}

fn quick(destination: Destination) -> Destination {
    let backoff = Backoff::exponential(ms(20), ms(200)).with_jitter(0.0);
    destination
        .with_backoff(backoff)
        .with_probe_backoff(backoff)
        .with_settle_delay(Duration::ZERO)
}

#[test]
fn every_answer_has_the_same_end_on_both() {
    for (ground, on) in grounds() {
        let calls: Arc<Mutex<HashMap<u64, u32>>> = Arc::default();
        let counted = Arc::clone(&calls);
        let send = move |entry: &OutboxEntry| {
            let nth = {
                let mut calls = counted.lock().unwrap();
                let nth = calls.entry(i_of(entry)).or_default();
                *nth += 1;
                *nth
            };
            match (i_of(entry), nth) {
                (1, _) => Dispatched::Completed {
                    remote_ref: Some("r".to_owned()),
                },
                (2, 1) => Dispatched::retryable("x.busy"),
                (3, _) => Dispatched::permanent("x.refused"),
                (4, 1) => Dispatched::unknown(),
                (5, 1) => panic!("the fault of this test"),
                (6, _) => Dispatched::retryable("x.always"),
                (7, 1) => {
                    std::thread::sleep(ms(400));
                    Dispatched::completed()
                }
                _ => Dispatched::completed(),
            }
        };
        let destination = quick(Destination::idempotent("a", send))
            .with_max_attempts(3)
            .with_send_timeout(ms(200));
        let ids = on.enqueued(7);
        let running = on.dispatcher(destination).start().unwrap();
        let ends = [
            (OutboxStatus::Completed, 1, None),
            (OutboxStatus::Completed, 2, Some("x.busy")),
            (OutboxStatus::Failed, 1, Some("x.refused")),
            (OutboxStatus::Completed, 2, None),
            (
                OutboxStatus::Completed,
                2,
                Some("turnframe.dispatch.sender_panicked"),
            ),
            (OutboxStatus::Failed, 3, Some("x.always")),
        ];
        for (id, (status, attempts, failure)) in ids.iter().zip(ends) {
            let record = on.until(*id, status);
            assert_eq!(record.entry.attempt_count, attempts, "{ground}");
            assert_eq!(record.last_failure.as_deref(), failure, "{ground}");
            assert_eq!(record.claim, None);
            assert!(record.entry.completed_at.is_some());
        }
        // The late answer, or the second call: either way it is done.
        let record = on.until(ids[6], OutboxStatus::Completed);
        let late = record.last_failure.as_deref();
        assert_eq!(late, Some("turnframe.dispatch.send_timeout"), "{ground}");
        let first = on.store.get(ids[0]).unwrap();
        assert_eq!(first.remote_ref.as_deref(), Some("r"));
        assert_eq!((running.stats().panics, running.stats().timeouts), (1, 1));
    }
}

#[test]
fn reconciliation_has_the_same_ends_on_both() {
    for (ground, on) in grounds() {
        let asked: Arc<Mutex<HashMap<u64, u32>>> = Arc::default();
        let calls = Arc::new(AtomicUsize::new(0));
        let (counted, counting) = (Arc::clone(&asked), Arc::clone(&calls));
        let send = move |entry: &OutboxEntry| {
            counting.fetch_add(1, Ordering::SeqCst);
            match (i_of(entry), entry.attempt_count) {
                (3, 2) => Dispatched::completed(),
                _ => Dispatched::unknown(),
            }
        };
        let reconcile = move |record: &OutboxRecord| {
            let nth = {
                let mut asked = counted.lock().unwrap();
                let nth = asked.entry(i_of(&record.entry)).or_default();
                *nth += 1;
                *nth
            };
            match (i_of(&record.entry), nth) {
                (_, 1) => Reconciled::Unresolved,
                (1, _) => Reconciled::Completed,
                (2, _) => Reconciled::Failed {
                    code: "x.never".to_owned(),
                },
                _ => Reconciled::Resend,
            }
        };
        let destination = quick(Destination::reconciled("a", send, reconcile));
        let ids = on.enqueued(3);
        let running = on.dispatcher(destination).start().unwrap();
        let ends = [
            (OutboxStatus::Completed, 1, 2, None),
            (OutboxStatus::Failed, 1, 2, Some("x.never")),
            (OutboxStatus::Completed, 2, 2, None),
        ];
        for (id, (status, attempts, probes, failure)) in ids.iter().zip(ends) {
            let record = on.until(*id, status);
            let found = (record.entry.attempt_count, record.probe_count);
            assert_eq!(found, (attempts, probes), "{ground}");
            assert_eq!(record.last_failure.as_deref(), failure, "{ground}");
        }
        assert_eq!(calls.load(Ordering::SeqCst), 4, "{ground}");
        assert_eq!(running.stats().reconciled, 2);
    }
}

#[test]
fn order_per_key_is_the_same_on_both() {
    for (ground, on) in grounds() {
        let (begun, begins) = unbounded();
        let send = move |entry: &OutboxEntry| {
            begun
                .send((entry.ordering_key.clone(), i_of(entry)))
                .unwrap();
            match i_of(entry) {
                2 if entry.ordering_key.as_deref() == Some("halts") => {
                    Dispatched::permanent("x.refused")
                }
                _ => Dispatched::completed(),
            }
        };
        let created: DateTime<Utc> = "2026-01-01T00:00:00Z".parse().unwrap();
        let mut ids = HashMap::new();
        // The youngest is enqueued first.
        for i in (1..=4).rev() {
            for key in ["flows", "halts"] {
                let entry = OutboxEntry::new("a", format!("{key}{i}"), &json!({ "i": i }))
                    .unwrap()
                    .ordering_key(key)
                    .with_created_at(created + Duration::from_secs(i));
                on.store.enqueue(&entry).unwrap();
                ids.insert((key, i), entry.outbox_id);
            }
        }
        let destination = Destination::idempotent("a", send).on_failure(KeyPolicy::Halt);
        let running = on.dispatcher(destination).start().unwrap();
        on.until(ids[&("flows", 4)], OutboxStatus::Completed);
        let failed = on.until(ids[&("halts", 2)], OutboxStatus::Failed);
        assert!(failed.halts_key, "{ground}");
        let waiting = on.store.get(ids[&("halts", 3)]).unwrap();
        assert_eq!(waiting.entry.status, OutboxStatus::Pending);
        on.store.skip_failed(ids[&("halts", 2)]).unwrap();
        on.until(ids[&("halts", 4)], OutboxStatus::Completed);
        running.stop(SOON);
        let mut of_key: HashMap<String, Vec<u64>> = HashMap::new();
        for (key, i) in begins.try_iter() {
            of_key.entry(key.unwrap()).or_default().push(i);
        }
        assert_eq!(of_key["flows"], [1, 2, 3, 4], "{ground}");
        assert_eq!(of_key["halts"], [1, 2, 3, 4], "{ground}");
    }
}

#[test]
fn a_stop_hands_back_the_same_on_both() {
    for (ground, on) in grounds() {
        let (send, arrivals, answer) = gated();
        let destination = Destination::idempotent("a", send)
            .with_concurrency(1)
            .with_prefetch(9);
        let ids = on.enqueued(10);
        let running = on.dispatcher(destination).start().unwrap();
        arrivals.recv_timeout(SOON).unwrap();
        eventually(SOON, "all claimed", || {
            (running.stats().claimed == 10).then_some(())
        });
        answer.send(Dispatched::completed()).unwrap();
        // The second call is left behind, and its outcome unknown.
        arrivals.recv_timeout(SOON).unwrap();
        let report = running.stop(ms(300));
        assert_eq!(
            (report.handed_back, report.left_unknown),
            (8, 1),
            "{ground}"
        );
        let mut by_status: HashMap<OutboxStatus, u32> = HashMap::new();
        for id in ids {
            let entry = on.store.get(id).unwrap().entry;
            *by_status.entry(entry.status).or_default() += 1;
            let attempts = u32::from(entry.status != OutboxStatus::Pending);
            assert_eq!(entry.attempt_count, attempts, "{ground}");
        }
        let of = |status| by_status.get(&status).copied().unwrap_or(0);
        assert_eq!(of(OutboxStatus::Completed), 1);
        assert_eq!(
            (of(OutboxStatus::OutcomeUnknown), of(OutboxStatus::Pending)),
            (1, 8)
        );
    }
}

#[test]
fn a_foreign_claim_lapses_and_is_resent_on_both() {
    for (ground, on) in grounds() {
        let ids = on.enqueued(2);
        let old = Utc::now() - HOUR;
        on.store.claim_due(Utc::now(), 1, "alive").unwrap();
        // Taken an hour ago, as far as anybody can tell.
        on.store.reschedule(ids[1], old).unwrap();
        assert_eq!(on.store.claim_due(old, 1, "gone").unwrap().len(), 1);
        let destination = quick(Destination::idempotent("a", |_: &OutboxEntry| {
            Dispatched::completed()
        }));
        let running = on.dispatcher(destination).start().unwrap();
        let record = on.until(ids[1], OutboxStatus::Completed);
        assert_eq!(
            (record.entry.attempt_count, record.probe_count),
            (2, 1),
            "{ground}"
        );
        assert_eq!(running.stats().lapsed, 1, "{ground}");
        let alive = on.store.get(ids[0]).unwrap();
        assert_eq!(alive.claim.unwrap().worker_id, "alive", "{ground}");
    }
}

// ---------------------------------------------------------------- what is apart

#[test]
fn an_idle_dispatcher_in_memory_is_woken_without_a_poll() {
    let outbox = MemoryOutbox::new();
    let (begun, begins) = unbounded();
    let send = move |entry: &OutboxEntry| {
        let _ = begun.send(i_of(entry));
        Dispatched::completed()
    };
    let _running = Dispatcher::in_memory(&outbox)
        .destination(Destination::idempotent("a", send))
        .with_poll(HOUR)
        .start()
        .unwrap();
    for i in 0..20 {
        std::thread::sleep(ms(20));
        let row = OutboxEntry::new("a", format!("k{i}"), &json!({ "i": i })).unwrap();
        outbox.enqueue(&row).unwrap();
        assert_eq!(begins.recv_timeout(stretched(ms(500))), Ok(i));
    }
}

#[test]
fn a_clock_that_is_moved_brings_what_falls_due() {
    let start: DateTime<Utc> = "2026-01-01T00:00:00Z".parse().unwrap();
    let clock = FakeClock::at(start);
    let outbox = MemoryOutbox::with_clock(&clock);
    let (begun, begins) = unbounded();
    let times = clock.clone();
    let send = move |entry: &OutboxEntry| {
        let _ = begun.send((entry.attempt_count, times.now()));
        match entry.attempt_count {
            1 => Dispatched::retryable("x"),
            _ => Dispatched::completed(),
        }
    };
    let exact = Backoff::exponential(HOUR, HOUR).with_jitter(0.0);
    let running = Dispatcher::in_memory(&outbox)
        .destination(Destination::idempotent("a", send).with_backoff(exact))
        .with_poll(24 * HOUR)
        .start()
        .unwrap();
    let row = OutboxEntry::new("a", "k", &json!({}))
        .unwrap()
        .not_before(start + HOUR);
    outbox.enqueue(&row).unwrap();
    assert!(begins.recv_timeout(ms(200)).is_err());
    clock.advance(HOUR);
    assert_eq!(begins.recv_timeout(SOON), Ok((1, start + HOUR)));
    eventually(SOON, "a row put back", || {
        (running.stats().retried == 1).then_some(())
    });
    let record = outbox.get(row.outbox_id).unwrap();
    assert_eq!(record.entry.next_attempt_at, Some(start + 2 * HOUR));
    clock.advance(HOUR - ms(1));
    assert!(begins.recv_timeout(ms(200)).is_err());
    clock.advance(ms(1));
    assert_eq!(begins.recv_timeout(SOON), Ok((2, start + 2 * HOUR)));
}

#[test]
fn a_lease_that_is_over_by_the_clock_lapses() {
    let clock = FakeClock::at("2026-01-01T00:00:00Z".parse().unwrap());
    let outbox = MemoryOutbox::with_clock(&clock);
    let (send, arrivals, answer) = gated();
    let frozen = Dispatcher::in_memory(&outbox)
        .destination(Destination::manual("a", send))
        .with_lease(Duration::from_secs(60))
        .with_maintenance_interval(HOUR)
        .start()
        .unwrap();
    let row = OutboxEntry::new("a", "k", &json!({ "i": 1 })).unwrap();
    outbox.enqueue(&row).unwrap();
    arrivals.recv_timeout(SOON).unwrap();
    clock.advance(Duration::from_secs(61));
    let mut other = Dispatcher::in_memory(&outbox)
        .destination(Destination::manual("a", |_: &OutboxEntry| {
            Dispatched::completed()
        }))
        .build()
        .unwrap();
    let swept = other.run_once().unwrap();
    // Its holder may have found it itself, if it was slow to start.
    assert_eq!(swept.lapsed + frozen.stats().lapsed, 1);
    let record = outbox.get(row.outbox_id).unwrap();
    assert_eq!(record.entry.status, OutboxStatus::OutcomeUnknown);
    assert_eq!(
        (record.lapse_count, record.unknown_for),
        (1, Some(Duration::ZERO))
    );
    clock.advance(HOUR);
    assert_eq!(outbox.get(row.outbox_id).unwrap().unknown_for, Some(HOUR));
    // The late answer is an answer.
    answer.send(Dispatched::completed()).unwrap();
    eventually(SOON, "the late answer", || {
        let record = outbox.get(row.outbox_id).unwrap();
        (record.entry.status == OutboxStatus::Completed).then_some(())
    });
    assert_eq!(frozen.stats().late_answers, 1);
}

#[test]
fn many_dispatchers_in_memory_send_each_row_once() {
    let outbox = MemoryOutbox::new();
    let sent: Arc<Mutex<HashMap<u64, usize>>> = Arc::default();
    let running: Vec<_> = (0..4)
        .map(|_| {
            let sent = Arc::clone(&sent);
            let send = move |entry: &OutboxEntry| {
                *sent.lock().unwrap().entry(i_of(entry)).or_default() += 1;
                Dispatched::completed()
            };
            Dispatcher::in_memory(&outbox)
                .destination(Destination::idempotent("a", send))
                .with_batch(10)
                .start()
                .unwrap()
        })
        .collect();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for w in 0..4 {
            let outbox = &outbox;
            scope.spawn(move || {
                for i in (w * 500)..((w + 1) * 500) {
                    let row = OutboxEntry::new("a", format!("k{i}"), &json!({ "i": i })).unwrap();
                    outbox.enqueue(&row).unwrap();
                }
            });
        }
    });
    eventually(3 * SOON, "all completed", || {
        let done: u64 = running.iter().map(|d| d.stats().completed).sum();
        (done == 2_000).then_some(())
    });
    let sent = sent.lock().unwrap();
    assert_eq!(sent.len(), 2_000, "{:?}", begun.elapsed());
    assert!(sent.values().all(|n| *n == 1));
}

#[test]
fn debug_shows_a_number_of_rows_and_nothing_of_them() {
    let outbox = MemoryOutbox::new();
    let row = OutboxEntry::new("SECRET", "SECRET", &"SECRET").unwrap();
    outbox.enqueue(&row).unwrap();
    let shown = format!("{outbox:?} {:?}", outbox.rows());
    assert!(
        shown.contains("rows: 1") && !shown.contains("SECRET"),
        "{shown}"
    );
}
