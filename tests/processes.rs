//! Dispatchers in processes of their own, frozen and killed at bad moments.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

mod support;

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};
use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::sql_types::Text;
use diesel_outbox::schema::tf_outbox;
use diesel_outbox::{
    Backoff, Destination, Dispatched, Dispatcher, OutboxEntry, OutboxRecord, OutboxStatus,
    Reconciled, Stats, code, enqueue, enqueue_all, get,
};
use serde_json::json;
use support::db::TestDb;
use support::dispatch::{SOON, enqueued, i_of, ms, rows, until_status, with_status};
use support::process::{Child, role, say};
use support::wait::{eventually, stretched};

diesel::table! {
    /// What the remote has done, by idempotency key.
    remote (id) {
        id -> Int8,
        key -> Text,
    }
}

const REMOTE: &str =
    "CREATE TABLE remote (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text NOT NULL)";

/// A dispatcher in a process of its own, on destination `a`. It says
/// `begun <i> <attempt> <key> <µs>` for each call, `lost <n>` and `late <n>` when
/// such an outcome is counted, and `ended` when SIGTERM has stopped it.
#[test]
fn dispatching() {
    role("dispatching", || {
        let setting = |name: &str| std::env::var(name).ok();
        let millis = |name, default| {
            setting(name).map_or(default, |text| ms(text.parse().expect("milliseconds")))
        };
        let url = setting("OUTBOX").unwrap();
        let destination = destination(&url, &setting("KIND").unwrap_or_default())
            .with_concurrency(setting("CALLS").map_or(8, |n| n.parse().unwrap()))
            .with_settle_delay(millis("SETTLE_DELAY", Duration::ZERO))
            .with_backoff(Backoff::exponential(ms(100), ms(100)).with_jitter(0.0));
        let running = Dispatcher::builder(&url)
            .destination(destination)
            .with_lease(millis("LEASE", Duration::from_secs(60)))
            .with_maintenance_interval(millis("MAINTENANCE", ms(200)))
            .with_batch(setting("BATCH").map_or(500, |n| n.parse().unwrap()))
            .start()
            .unwrap();
        let terminated = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::clone(&terminated)).unwrap();
        say(&format!("up {}", running.worker_id()));
        let mut told = Stats::default();
        while !terminated.load(Ordering::Relaxed) {
            let stats = running.stats();
            if stats.lost_claims != told.lost_claims {
                say(&format!("lost {}", stats.lost_claims));
            }
            if stats.late_answers != told.late_answers {
                say(&format!("late {}", stats.late_answers));
            }
            told = stats;
            std::thread::sleep(ms(5));
        }
        running.stop(Duration::from_secs(5));
        say("ended");
    });
}

/// Its sender has its effect in `remote`, waits for the file `<GATE>/<i>` if there
/// is a gate, and answers after `CALL` that it was delivered.
fn destination(url: &str, kind: &str) -> Destination {
    let remote_url = url.to_owned();
    let (gate, call) = (std::env::var("GATE"), std::env::var("CALL"));
    let has_effect = std::env::var("EFFECT").as_deref() != Ok("none");
    let call = call.map_or(Duration::ZERO, |text| ms(text.parse().unwrap()));
    let send = move |entry: &OutboxEntry| {
        if has_effect {
            diesel::insert_into(remote::table)
                .values(remote::key.eq(&entry.idempotency_key))
                .execute(&mut PgConnection::establish(&remote_url).unwrap())
                .unwrap();
        }
        let (i, attempt, key) = (i_of(entry), entry.attempt_count, &entry.idempotency_key);
        let now = Utc::now().timestamp_micros();
        say(&format!("begun {i} {attempt} {key} {now}"));
        if let Ok(gate) = &gate {
            let open = Path::new(gate).join(i.to_string());
            while !open.exists() {
                std::thread::sleep(ms(5));
            }
        }
        std::thread::sleep(call);
        Dispatched::completed()
    };
    let remote_url = url.to_owned();
    let reconcile = move |record: &OutboxRecord| {
        let mut conn = PgConnection::establish(&remote_url).unwrap();
        match effects(&mut conn, &record.entry.idempotency_key) {
            0 => Reconciled::Resend,
            _ => Reconciled::Completed,
        }
    };
    match kind {
        "manual" => Destination::manual("a", send),
        "reconciled" => Destination::reconciled("a", send, reconcile),
        _ => Destination::idempotent("a", send),
    }
}

fn effects(conn: &mut PgConnection, key: &str) -> i64 {
    let of_key = remote::table.filter(remote::key.eq(key));
    of_key.count().get_result(conn).unwrap()
}

/// A database with a remote in it.
fn database() -> TestDb {
    let db = TestDb::new();
    db.execute(REMOTE);
    db
}

/// A dispatcher, once it has started.
fn start(db: &TestDb, settings: &[(&str, &str)]) -> Child {
    start_on(db.url(), settings)
}

fn start_on(url: &str, settings: &[(&str, &str)]) -> Child {
    let mut environment = vec![("OUTBOX", url)];
    environment.extend(settings);
    let child = Child::spawn("dispatching", &environment);
    child.wait_line("up ", Duration::from_secs(30));
    child
}

/// What a `begun` line says.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Begun {
    i: u64,
    attempt: u32,
    key: String,
    at: DateTime<Utc>,
}

impl Begun {
    fn parse(line: &str) -> Self {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [i, attempt, key, at] = words[..] else {
            panic!("not four words: {line}")
        };
        Self {
            i: i.parse().unwrap(),
            attempt: attempt.parse().unwrap(),
            key: key.to_owned(),
            at: DateTime::from_timestamp_micros(at.parse().unwrap()).unwrap(),
        }
    }

    fn next(child: &Child) -> Self {
        Self::parse(&child.wait_line("begun ", SOON))
    }
}

/// Ends a dispatcher in order; returns the calls it has not told of before.
fn end(mut child: Child) -> Vec<Begun> {
    child.sigterm();
    let mut begun = Vec::new();
    loop {
        let line = child.wait_line("", Duration::from_secs(20));
        match line.strip_prefix("begun ") {
            Some(rest) => begun.push(Begun::parse(rest)),
            None if line == "ended" => break,
            None => {}
        }
    }
    assert!(child.wait_exit(SOON).success());
    begun
}

/// A gate whose every call waits until it is opened.
fn gate() -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap().to_owned();
    (dir, path)
}

fn open(gate: &tempfile::TempDir, i: u64) {
    std::fs::write(gate.path().join(i.to_string()), "").unwrap();
}

// S1
#[test]
fn a_frozen_dispatcher_neither_settles_nor_renews_what_another_has_claimed_since() {
    let db = database();
    let ids = enqueued(&db, 1);
    let ((gate_a, path_a), (gate_b, path_b)) = (gate(), gate());
    let a = start(&db, &[("LEASE", "1000"), ("GATE", &path_a)]);
    assert_eq!(Begun::next(&a).attempt, 1);
    a.sigstop();
    let b = start(&db, &[("GATE", &path_b)]);
    // Its claim lapsed, and only then was the row sent again.
    assert_eq!(Begun::next(&b).attempt, 2);
    let mut conn = db.connect();
    let held = get(&mut conn, ids[0]).unwrap();
    let holder = held.claim.unwrap().worker_id;
    a.sigcont();
    open(&gate_a, 1);
    assert_eq!(a.wait_line("lost ", SOON), "1");
    let record = get(&mut conn, ids[0]).unwrap();
    assert_eq!(record.entry.status, OutboxStatus::Dispatching);
    assert_eq!(record.entry.attempt_count, 2);
    assert_eq!(record.claim.unwrap().worker_id, holder);
    open(&gate_b, 1);
    let record = until_status(&mut conn, ids[0], OutboxStatus::Completed);
    assert_eq!((record.entry.attempt_count, record.lapse_count), (2, 0));
    assert_eq!(end(a), []);
    assert_eq!(end(b), []);
}

#[test]
fn the_late_answer_of_a_frozen_dispatcher_counts_if_nobody_has_claimed_since() {
    let db = database();
    let ids = enqueued(&db, 1);
    let (gate, path) = gate();
    let manual = ("KIND", "manual");
    let a = start(&db, &[manual, ("LEASE", "1000"), ("GATE", &*path)]);
    Begun::next(&a);
    a.sigstop();
    let b = start(&db, &[manual]);
    let mut conn = db.connect();
    let record = until_status(&mut conn, ids[0], OutboxStatus::OutcomeUnknown);
    assert_eq!(record.last_failure.as_deref(), Some(code::LAPSED));
    a.sigcont();
    open(&gate, 1);
    assert_eq!(a.wait_line("late ", SOON), "1");
    let record = until_status(&mut conn, ids[0], OutboxStatus::Completed);
    assert_eq!((record.entry.attempt_count, record.lapse_count), (1, 0));
    assert_eq!(effects(&mut conn, "k1"), 1);
    assert_eq!(end(b), []);
}

/// Freezes a dispatcher inside the transaction that sets `status`, holding the
/// row's lock, and lets another go on.
fn frozen_in_the_transaction_to(status: &str, key: Option<&str>) {
    #[derive(QueryableByName)]
    struct State {
        #[diesel(sql_type = Text)]
        state: String,
    }
    let db = database();
    db.execute(&format!(
        "CREATE FUNCTION held() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN
             IF current_setting('application_name') = 'frozen' AND NEW.status = '{status}' THEN
                 -- Not by waiting for the lock, which `lock_timeout` would end.
                 WHILE NOT pg_try_advisory_xact_lock(42) LOOP
                     PERFORM pg_sleep(0.01);
                 END LOOP;
             END IF;
             RETURN NEW;
         END $$;
         CREATE TRIGGER held AFTER UPDATE ON tf_outbox FOR EACH ROW EXECUTE FUNCTION held()"
    ));
    let mut conn = db.connect();
    let mut holder = db.connect();
    holder.batch_execute("SELECT pg_advisory_lock(42)").unwrap();
    let separator = if db.url().contains('?') { '&' } else { '?' };
    let url = format!("{}{separator}application_name=frozen", db.url());
    let a = start_on(&url, &[("LEASE", "2000")]);
    let row = OutboxEntry::new("a", "k1", &json!({ "i": 1 })).unwrap();
    let row = match key {
        Some(key) => row.ordering_key(key),
        None => row,
    };
    enqueue(&mut db.connect(), &row).unwrap();
    let mut state_of_a = |wanted: &str| {
        eventually(SOON, wanted, || {
            diesel::sql_query(
                "SELECT coalesce(wait_event_type, '') || ' ' || coalesce(state, '') AS state
                   FROM pg_stat_activity
                  WHERE datname = current_database() AND application_name = 'frozen'",
            )
            .load::<State>(&mut conn)
            .unwrap()
            .into_iter()
            .any(|row| row.state == wanted)
            .then_some(())
        });
    };
    state_of_a("Timeout active");
    a.sigstop();
    let frozen = Instant::now();
    holder
        .batch_execute("SELECT pg_advisory_unlock(42)")
        .unwrap();
    // Its statement has ended, and there is nobody to end its transaction.
    state_of_a("Client idle in transaction");
    let b = start(&db, &[]);
    let within = stretched(Duration::from_secs(12));
    let id = row.outbox_id;
    eventually(within, "the other goes on", || {
        let record = get(&mut conn, id).unwrap();
        (record.entry.status == OutboxStatus::Completed).then_some(())
    });
    assert!(frozen.elapsed() < within);
    assert_eq!(end(b).len(), 1);
    a.sigcont();
    end(a);
    let record = get(&mut conn, id).unwrap();
    assert_eq!(record.entry.status, OutboxStatus::Completed);
}

#[test]
fn a_dispatcher_frozen_inside_its_claim_holds_nobody_up() {
    frozen_in_the_transaction_to("dispatching", None);
}

/// It holds the lock by which keyed claims of a destination take turns.
#[test]
fn a_dispatcher_frozen_inside_its_keyed_claim_holds_nobody_up() {
    frozen_in_the_transaction_to("dispatching", Some("key"));
}

#[test]
fn a_dispatcher_frozen_inside_its_settlement_holds_nobody_up() {
    frozen_in_the_transaction_to("completed", None);
}

/// Kills a dispatcher while it sends, and lets another ask what became of it.
fn killed_while_it_sends(effect: &str, calls_of_the_other: usize) {
    let db = database();
    let ids = enqueued(&db, 1);
    let (_gate, path) = gate();
    let reconciled = ("KIND", "reconciled");
    let short = ("LEASE", "1000");
    let mut a = start(
        &db,
        &[reconciled, short, ("GATE", &path), ("EFFECT", effect)],
    );
    Begun::next(&a);
    a.sigkill();
    let b = start(&db, &[reconciled, ("SETTLE_DELAY", "1000")]);
    let mut conn = db.connect();
    let record = until_status(&mut conn, ids[0], OutboxStatus::OutcomeUnknown);
    assert_eq!(record.last_failure.as_deref(), Some(code::LAPSED));
    assert_eq!((record.lapse_count, record.probe_count), (1, 0));
    let record = until_status(&mut conn, ids[0], OutboxStatus::Completed);
    assert_eq!(record.probe_count, 1);
    assert_eq!(effects(&mut conn, "k1"), 1);
    assert_eq!(end(b).len(), calls_of_the_other);
}

#[test]
fn after_a_kill_a_remote_that_had_it_is_asked_and_not_called_again() {
    killed_while_it_sends("one", 0);
}

#[test]
fn after_a_kill_a_remote_that_never_had_it_is_asked_and_then_called() {
    killed_while_it_sends("none", 1);
}

// S8
#[test]
fn after_a_kill_an_idempotent_remote_is_called_again_with_the_same_keys() {
    let db = database();
    db.execute(
        "CREATE TABLE ever_failed (id uuid PRIMARY KEY);
         CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN
             INSERT INTO ever_failed VALUES (NEW.outbox_id);
             RETURN NEW;
         END $$;
         CREATE TRIGGER note AFTER UPDATE ON tf_outbox FOR EACH ROW
             WHEN (NEW.status = 'failed') EXECUTE FUNCTION note()",
    );
    let ids = enqueued(&db, 3);
    let (_gate, path) = gate();
    let mut a = start(&db, &[("LEASE", "2000"), ("GATE", &path)]);
    let keys = |begun: Vec<Begun>| begun.into_iter().map(|b| b.key).collect::<BTreeSet<_>>();
    let first = keys((0..3).map(|_| Begun::next(&a)).collect());
    a.sigkill();
    let b = start(&db, &[]);
    let started = Instant::now();
    let again: Vec<_> = (0..3).map(|_| Begun::next(&b)).collect();
    assert!(started.elapsed() < stretched(ms(2_000 + 200 + 2_000)));
    assert!(again.iter().all(|call| call.attempt == 2));
    assert_eq!(keys(again), first);
    let mut conn = db.connect();
    for id in ids {
        let record = until_status(&mut conn, id, OutboxStatus::Completed);
        assert_eq!(record.entry.attempt_count, 2);
    }
    diesel::table! {
        ever_failed (id) { id -> Uuid, }
    }
    let failed: i64 = ever_failed::table.count().get_result(&mut conn).unwrap();
    assert_eq!(failed, 0);
}

// L1
#[test]
fn a_call_longer_than_its_lease_is_made_once() {
    let db = database();
    let lease = ("LEASE", "2000");
    let a = start(&db, &[lease, ("CALL", "11000")]);
    let ids = enqueued(&db, 1);
    Begun::next(&a);
    let b = start(&db, &[lease]);
    let mut conn = db.connect();
    let mut seen = BTreeSet::new();
    let record = eventually(Duration::from_secs(20), "completed", || {
        let record = get(&mut conn, ids[0]).unwrap();
        seen.extend(record.claim.as_ref().map(|claim| claim.claimed_at));
        (record.entry.status == OutboxStatus::Completed).then_some(record)
    });
    assert!(seen.len() > 4, "renewed {} times", seen.len() - 1);
    assert_eq!(record.entry.attempt_count, 1);
    assert_eq!((end(a), end(b)), (vec![], vec![]));
}

// L5
#[test]
fn starting_and_stopping_one_process_never_frees_the_claims_of_another() {
    let db = database();
    let (gate, path) = gate();
    let a = start(&db, &[("LEASE", "10000"), ("GATE", &path), ("CALLS", "10")]);
    let ids = enqueued(&db, 10);
    for _ in 0..10 {
        Begun::next(&a);
    }
    for _ in 0..20 {
        let b = start(&db, &[("LEASE", "10000")]);
        assert_eq!(end(b), []);
    }
    let mut conn = db.connect();
    assert_eq!(with_status(&mut conn, "dispatching"), 10);
    for i in 1..=10 {
        open(&gate, i);
    }
    for id in ids {
        let record = until_status(&mut conn, id, OutboxStatus::Completed);
        assert_eq!(record.entry.attempt_count, 1);
    }
    assert_eq!(end(a), []);
}

// C2
#[test]
fn rows_due_at_one_instant_are_sent_once_each_and_not_before() {
    const ROWS: usize = 10_000;
    let db = database();
    let settings = [("BATCH", "100"), ("CALLS", "4"), ("EFFECT", "none")];
    let running: Vec<_> = (0..4).map(|_| start(&db, &settings)).collect();
    let mut conn = db.connect();
    let mut batch = rows(ROWS);
    for entry in &mut batch {
        entry.next_attempt_at = Some(Utc::now() + TimeDelta::hours(1));
    }
    for part in batch.chunks(2_000) {
        enqueue_all(&mut conn, part).unwrap();
    }
    let due = Utc::now() + TimeDelta::seconds(3);
    diesel::update(tf_outbox::table)
        .set(tf_outbox::next_attempt_at.eq(due))
        .execute(&mut conn)
        .unwrap();
    assert!(
        Utc::now() < due,
        "enqueued too slowly for this test to mean anything"
    );
    eventually(Duration::from_secs(60), "all completed", || {
        (with_status(&mut conn, "completed") == ROWS as i64).then_some(())
    });
    let mut sent: HashMap<u64, usize> = HashMap::new();
    let mut at_work = 0;
    for child in running {
        let calls = end(child);
        at_work += usize::from(!calls.is_empty());
        for call in calls {
            assert!(
                call.at >= due,
                "{} µs early",
                (due - call.at).num_microseconds().unwrap()
            );
            assert_eq!(call.attempt, 1);
            *sent.entry(call.i).or_default() += 1;
        }
    }
    assert_eq!(sent.len(), ROWS);
    assert!(sent.values().all(|n| *n == 1));
    assert!(at_work > 1, "one process did it all");
    let once: i64 = tf_outbox::table
        .filter(tf_outbox::attempt_count.eq(1))
        .count()
        .get_result(&mut conn)
        .unwrap();
    assert_eq!(once, ROWS as i64);
}
