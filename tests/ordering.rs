//! Order per key: rows of one (destination, key) are begun one after another.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use crossbeam_channel::unbounded;
use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::sql_types::{Integer, Text};
use diesel_outbox::schema::tf_outbox;
use diesel_outbox::{
    Backoff, Destination, Dispatched, Dispatcher, KeyPolicy, OutboxEntry, OutboxId, OutboxStatus,
    enqueue, enqueue_all, get, mark_completed, redrive, skip_failed,
};
use serde_json::json;
use support::db::TestDb;
use support::dispatch::{SOON, dispatcher, gated, i_of, idempotent, ms, until_status, with_status};
use support::process::{Child, role, say};
use support::wait::{eventually, stretched};
use uuid::Uuid;

diesel::table! {
    /// Every change of a row's status, written by a trigger.
    moves (id) {
        id -> Int8,
        outbox_id -> Uuid,
        key -> Text,
        i -> Int8,
        status -> Text,
    }
}

diesel::table! {
    /// Calls that met another of their key.
    meetings (key) {
        key -> Text,
    }
}

diesel::define_sql_function! {
    fn pg_try_advisory_lock(class: Integer, object: Integer) -> Bool;
}
diesel::define_sql_function! {
    fn pg_advisory_unlock(class: Integer, object: Integer) -> Bool;
}
diesel::define_sql_function! {
    fn hashtext(text: Text) -> Integer;
}

/// `moves` is in the order of the changes of each key, because a claim sees what
/// ended the flight before it: the number is drawn after that commit.
const AUDIT: &str = "
    CREATE TABLE moves (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, outbox_id uuid NOT NULL,
                        key text NOT NULL, i bigint NOT NULL, status text NOT NULL);
    CREATE TABLE meetings (key text PRIMARY KEY);
    CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF NEW.ordering_key IS NOT NULL AND NEW.status <> OLD.status THEN
            INSERT INTO moves (outbox_id, key, i, status)
            VALUES (NEW.outbox_id, NEW.ordering_key, (NEW.payload->>'i')::bigint, NEW.status);
        END IF;
        RETURN NULL;
    END $$;
    CREATE TRIGGER audit AFTER UPDATE ON tf_outbox FOR EACH ROW EXECUTE FUNCTION audit()";

fn audited() -> TestDb {
    let db = TestDb::new();
    db.execute(AUDIT);
    db
}

/// Row `i` of `key`, made `i` seconds after the others' beginning.
fn row(key: &str, i: i64) -> OutboxEntry {
    let beginning: DateTime<Utc> = "2026-01-01T00:00:00Z".parse().unwrap();
    OutboxEntry::new("a", format!("{key}-{i}"), &json!({ "i": i }))
        .unwrap()
        .ordering_key(key)
        .with_created_at(beginning + TimeDelta::seconds(i))
}

fn put(db: &TestDb, row: OutboxEntry) -> OutboxId {
    enqueue(&mut db.connect(), &row).unwrap();
    row.outbox_id
}

/// What happened to each key, in order.
fn moves_by_key(conn: &mut PgConnection) -> BTreeMap<String, Vec<(i64, String)>> {
    let moves: Vec<(String, i64, String)> = moves::table
        .order(moves::id)
        .select((moves::key, moves::i, moves::status))
        .load(conn)
        .unwrap();
    let mut by_key: BTreeMap<String, Vec<(i64, String)>> = BTreeMap::new();
    for (key, i, status) in moves {
        by_key.entry(key).or_default().push((i, status));
    }
    by_key
}

/// Nothing of the key is claimed while another is in flight or unknown.
fn assert_one_at_a_time(key: &str, moves: &[(i64, String)]) {
    let mut open: Option<i64> = None;
    for (i, status) in moves {
        if status == "dispatching" {
            assert!(
                open.is_none_or(|open| open == *i),
                "{key}: {i} beside {open:?}"
            );
        }
        open = matches!(status.as_str(), "dispatching" | "outcome_unknown").then_some(*i);
    }
}

/// Row by row, each to its end before the next is claimed.
fn assert_in_order(key: &str, moves: &[(i64, String)], rows: i64) {
    let mut next = 1;
    for (i, status) in moves {
        assert_eq!(*i, next, "{key}: {moves:?}");
        if matches!(status.as_str(), "completed" | "failed") {
            next += 1;
        }
    }
    assert_eq!(next, rows + 1, "{key}: {moves:?}");
}

/// A dispatcher in a process of its own, until it is killed. Its calls fail in all
/// ways, each row's the first time only, and note when they meet another of their
/// key.
#[test]
fn dispatching() {
    role("dispatching", || {
        std::panic::set_hook(Box::new(|_| {}));
        let url = std::env::var("OUTBOX").unwrap();
        let remote = diesel::r2d2::Pool::builder()
            .max_size(8)
            .build(diesel::r2d2::ConnectionManager::<PgConnection>::new(&url))
            .unwrap();
        let send = move |entry: &OutboxEntry| {
            let conn = &mut *remote.get().unwrap();
            let key = entry.ordering_key.as_deref().unwrap();
            let alone: bool = diesel::select(pg_try_advisory_lock(1, hashtext(key)))
                .get_result(conn)
                .unwrap();
            if !alone {
                diesel::insert_into(meetings::table)
                    .values(meetings::key.eq(key))
                    .on_conflict_do_nothing()
                    .execute(conn)
                    .unwrap();
            }
            let dice = entry.outbox_id.0.as_u128() % 100;
            std::thread::sleep(Duration::from_micros((dice * 20) as u64));
            if alone {
                let _: bool = diesel::select(pg_advisory_unlock(1, hashtext(key)))
                    .get_result(conn)
                    .unwrap();
            }
            match dice {
                0..5 if entry.attempt_count == 1 => Dispatched::retryable("test.down"),
                5 if entry.attempt_count == 1 => panic!("as the test has it"),
                6 if entry.attempt_count == 1 => Dispatched::unknown(),
                7 => Dispatched::permanent("test.refused"),
                _ => Dispatched::completed(),
            }
        };
        let destination = Destination::idempotent("a", send)
            .with_backoff(Backoff::exponential(ms(20), ms(20)).with_jitter(0.0));
        let _running = Dispatcher::builder(&url)
            .destination(destination)
            .with_lease(Duration::from_secs(2))
            .with_maintenance_interval(ms(200))
            .start()
            .unwrap();
        say("up");
        loop {
            std::thread::park();
        }
    });
}

#[test]
fn rows_of_one_key_are_begun_one_after_another_by_four_processes_one_of_which_is_killed() {
    const KEYS: i64 = 200;
    const ROWS: i64 = 50;
    let db = audited();
    let mut conn = db.connect();
    for key in 0..KEYS {
        let rows: Vec<_> = (1..=ROWS).map(|i| row(&format!("key-{key}"), i)).collect();
        enqueue_all(&mut conn, &rows).unwrap();
    }
    let start = || Child::spawn("dispatching", &[("OUTBOX", db.url())]);
    let mut processes: Vec<Child> = (0..4).map(|_| start()).collect();
    for process in &processes {
        process.wait_line("up", SOON);
    }
    eventually(SOON, "a quarter is completed", || {
        (with_status(&mut conn, "completed") > KEYS * ROWS / 4).then_some(())
    });
    processes[0].sigkill();
    eventually(Duration::from_secs(120), "all rows have ended", || {
        (with_status(&mut conn, "completed") + with_status(&mut conn, "failed") == KEYS * ROWS)
            .then_some(())
    });
    let by_key = moves_by_key(&mut conn);
    assert_eq!(by_key.len() as i64, KEYS);
    for (key, moves) in &by_key {
        assert_one_at_a_time(key, moves);
        assert_in_order(key, moves, ROWS);
    }
    let meetings: Vec<String> = meetings::table
        .select(meetings::key)
        .load(&mut conn)
        .unwrap();
    assert_eq!(meetings, Vec::<String>::new());
    // The faults happened: refusals, retries, unknown outcomes, and the kill.
    let lapses: Vec<i64> = moves::table
        .filter(moves::status.eq("outcome_unknown"))
        .select(moves::i)
        .load(&mut conn)
        .unwrap();
    assert!(lapses.len() > 50, "{}", lapses.len());
    assert!(with_status(&mut conn, "failed") > 20);
}

#[test]
fn late_commits_and_redrives_never_put_two_rows_of_a_key_in_flight() {
    const KEYS: u64 = 8;
    const ROWS: i64 = 150;
    let db = audited();
    let url = db.url().to_owned();
    let send = |entry: &OutboxEntry| {
        let dice = entry.outbox_id.0.as_u128() % 40;
        std::thread::sleep(ms(dice as u64 % 4));
        match dice {
            0 if entry.attempt_count == 1 => Dispatched::retryable("test.down"),
            1 if entry.attempt_count == 1 => Dispatched::unknown(),
            2..6 => Dispatched::permanent("test.refused"),
            _ => Dispatched::completed(),
        }
    };
    let start = || {
        let destination = idempotent("a", send)
            .with_backoff(Backoff::exponential(ms(20), ms(20)).with_jitter(0.0));
        dispatcher(&db, destination).start().unwrap()
    };
    let running = [start(), start()];
    let (refused, done) = (AtomicBool::new(true), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let enqueuers: Vec<_> = (0..6_u64)
            .map(|n| {
                let url = &url;
                scope.spawn(move || {
                    let mut conn = PgConnection::establish(url).unwrap();
                    for i in 0..ROWS {
                        let (dice, skew) = (Uuid::new_v4().as_u128(), TimeDelta::seconds(3600));
                        // Made at any time of the last two hours, by hosts whose
                        // clocks differ.
                        let mut entry = row(&format!("key-{}", dice as u64 % KEYS), i)
                            .with_created_at(Utc::now() - skew * (dice % 3) as i32);
                        entry.idempotency_key = format!("{n}-{i}");
                        let ended = conn.transaction(|conn| {
                            enqueue(conn, &entry).unwrap();
                            std::thread::sleep(ms((dice >> 64) as u64 % 20));
                            match dice % 7 {
                                0 => Err(diesel::result::Error::RollbackTransaction),
                                _ => Ok(()),
                            }
                        });
                        assert_eq!(ended.is_err(), dice % 7 == 0);
                    }
                })
            })
            .collect();
        // An operator sends failed rows again, which are older than what flies.
        let operator = scope.spawn(|| {
            let mut conn = PgConnection::establish(&url).unwrap();
            let mut redriven = 0;
            while !done.load(Ordering::Acquire) {
                let failed: Vec<Uuid> = tf_outbox::table
                    .filter(tf_outbox::status.eq("failed"))
                    .select(tf_outbox::outbox_id)
                    .load(&mut conn)
                    .unwrap();
                for id in failed.into_iter().take(10) {
                    redrive(&mut conn, OutboxId(id)).unwrap();
                    redriven += 1;
                }
                std::thread::sleep(ms(20));
            }
            redriven
        });
        for enqueuer in enqueuers {
            enqueuer.join().unwrap();
        }
        done.store(true, Ordering::Release);
        assert!(operator.join().unwrap() > 20);
        refused.store(false, Ordering::Release);
    });
    let mut conn = db.connect();
    eventually(Duration::from_secs(60), "all rows have ended", || {
        let open = ["pending", "dispatching", "outcome_unknown"];
        let open: i64 = open
            .iter()
            .map(|status| with_status(&mut conn, status))
            .sum();
        (open == 0).then_some(())
    });
    for dispatcher in running {
        dispatcher.stop(SOON);
    }
    let by_key = moves_by_key(&mut conn);
    assert_eq!(by_key.len() as u64, KEYS);
    for (key, moves) in &by_key {
        assert_one_at_a_time(key, moves);
    }
}

#[test]
fn the_oldest_row_is_next_also_when_it_was_committed_last() {
    let db = audited();
    let (send, arrivals, answer) = gated();
    let dispatcher = dispatcher(&db, idempotent("a", send)).start().unwrap();
    put(&db, row("key", 2));
    assert_eq!(arrivals.recv_timeout(SOON), Ok(2));
    put(&db, row("key", 3));
    put(&db, row("key", 1));
    put(&db, row("other", 9));
    assert_eq!(arrivals.recv_timeout(SOON), Ok(9));
    assert!(arrivals.recv_timeout(ms(600)).is_err(), "2 is in flight");
    answer.send(Dispatched::completed()).unwrap();
    answer.send(Dispatched::completed()).unwrap();
    assert_eq!(arrivals.recv_timeout(SOON), Ok(1));
    answer.send(Dispatched::completed()).unwrap();
    assert_eq!(arrivals.recv_timeout(SOON), Ok(3));
    answer.send(Dispatched::completed()).unwrap();
    dispatcher.stop(SOON);
}

#[test]
fn a_row_in_backoff_holds_back_its_key_and_nobody_elses() {
    let db = audited();
    let (begun, begins) = unbounded();
    let send = move |entry: &OutboxEntry| {
        begun.send((i_of(entry), entry.attempt_count)).unwrap();
        match (i_of(entry), entry.attempt_count) {
            (1, 1) => Dispatched::retryable("test.down"),
            _ => Dispatched::completed(),
        }
    };
    let destination = idempotent("a", send)
        .with_backoff(Backoff::exponential(ms(1500), ms(1500)).with_jitter(0.0));
    let mut conn = db.connect();
    enqueue_all(&mut conn, &[row("key", 1), row("key", 2)]).unwrap();
    let dispatcher = dispatcher(&db, destination).start().unwrap();
    assert_eq!(begins.recv_timeout(SOON), Ok((1, 1)));
    let mut unkeyed = row("-", 8);
    unkeyed.ordering_key = None;
    enqueue_all(&mut conn, &[row("other", 9), unkeyed]).unwrap();
    let next = || begins.recv_timeout(SOON).unwrap();
    let mut others = [next(), next()];
    others.sort_unstable();
    assert_eq!(others, [(8, 1), (9, 1)]);
    assert_eq!([next(), next()], [(1, 2), (2, 1)]);
    dispatcher.stop(SOON);
}

#[test]
fn an_unknown_row_holds_back_its_key_until_somebody_resolves_it() {
    let db = audited();
    let (begun, begins) = unbounded();
    let send = move |entry: &OutboxEntry| {
        begun.send(i_of(entry)).unwrap();
        match i_of(entry) {
            1 => Dispatched::unknown(),
            _ => Dispatched::completed(),
        }
    };
    let first = put(&db, row("key", 1));
    put(&db, row("key", 2));
    put(&db, row("other", 9));
    let mut conn = db.connect();
    let dispatcher = dispatcher(&db, Destination::manual("a", send))
        .start()
        .unwrap();
    until_status(&mut conn, first, OutboxStatus::OutcomeUnknown);
    let mut begun = [(); 2].map(|()| begins.recv_timeout(SOON).unwrap());
    begun.sort_unstable();
    assert_eq!(begun, [1, 9]);
    assert!(begins.recv_timeout(ms(600)).is_err());
    mark_completed(&mut conn, first).unwrap();
    assert_eq!(begins.recv_timeout(SOON), Ok(2));
    dispatcher.stop(SOON);
}

/// A dispatcher that refuses row 1 of each key the first time.
fn refusing(
    db: &TestDb,
    policy: KeyPolicy,
) -> (
    diesel_outbox::DispatcherHandle,
    crossbeam_channel::Receiver<(String, u64)>,
) {
    let (begun, begins) = unbounded();
    let first = Arc::new(std::sync::Mutex::new(std::collections::HashSet::new()));
    let send = move |entry: &OutboxEntry| {
        begun
            .send((entry.ordering_key.clone().unwrap(), i_of(entry)))
            .unwrap();
        match i_of(entry) == 1 && first.lock().unwrap().insert(entry.outbox_id) {
            true => Dispatched::permanent("test.refused"),
            false => Dispatched::completed(),
        }
    };
    let destination = idempotent("a", send).on_failure(policy);
    (dispatcher(db, destination).start().unwrap(), begins)
}

#[test]
fn a_failed_row_lets_the_later_ones_of_its_key_pass() {
    let db = audited();
    let first = put(&db, row("key", 1));
    let second = put(&db, row("key", 2));
    let (dispatcher, _begins) = refusing(&db, KeyPolicy::Pass);
    let mut conn = db.connect();
    until_status(&mut conn, second, OutboxStatus::Completed);
    let failed = get(&mut conn, first).unwrap();
    assert_eq!(
        (failed.entry.status, failed.halts_key),
        (OutboxStatus::Failed, false)
    );
    dispatcher.stop(SOON);
}

#[test]
fn a_failed_row_halts_its_key_where_its_destination_says_so_until_an_operator_acts() {
    let db = audited();
    let mut conn = db.connect();
    let ids = ["redriven", "skipped", "foreign"].map(|key| put(&db, row(key, 1)));
    let later = ["redriven", "skipped", "foreign"].map(|key| put(&db, row(key, 2)));
    let (dispatcher, begins) = refusing(&db, KeyPolicy::Halt);
    for id in ids {
        let failed = until_status(&mut conn, id, OutboxStatus::Failed);
        assert!(failed.halts_key);
    }
    // Others go on, and so do rows without a key that fail.
    let other = put(&db, row("other", 9));
    until_status(&mut conn, other, OutboxStatus::Completed);
    for id in later {
        assert_eq!(
            get(&mut conn, id).unwrap().entry.status,
            OutboxStatus::Pending
        );
    }
    redrive(&mut conn, ids[0]).unwrap();
    skip_failed(&mut conn, ids[1]).unwrap();
    // The other implementation knows nothing of the column and leaves it.
    diesel::update(tf_outbox::table.find(ids[2].0))
        .set((
            tf_outbox::status.eq("pending"),
            tf_outbox::completed_at.eq(None::<DateTime<Utc>>),
        ))
        .execute(&mut conn)
        .unwrap();
    for id in later {
        until_status(&mut conn, id, OutboxStatus::Completed);
    }
    let standing = ids.map(|id| {
        let record = get(&mut conn, id).unwrap();
        (record.entry.status, record.halts_key)
    });
    assert_eq!(
        standing,
        [
            (OutboxStatus::Completed, false),
            (OutboxStatus::Failed, false),
            (OutboxStatus::Completed, true),
        ]
    );
    dispatcher.stop(SOON);
    let begun: Vec<(String, u64)> = begins.try_iter().collect();
    let of = |key: &str| -> Vec<u64> {
        let calls = begun.iter().filter(|(k, _)| k == key);
        calls.map(|(_, i)| *i).collect()
    };
    assert_eq!(of("redriven"), [1, 1, 2]);
    assert_eq!(of("skipped"), [1, 2]);
    assert_eq!(of("foreign"), [1, 1, 2]);
}

/// `n` due rows by SQL, all enqueued an hour ago; `key` and `due` are SQL
/// expressions of `i`.
fn many(db: &TestDb, n: u32, key: &str, due: &str) {
    db.execute(&format!(
        "INSERT INTO tf_outbox (outbox_id, command_id, destination, payload, idempotency_key,
                                status, created_at, enqueued_at, ordering_key, next_attempt_at)
         SELECT gen_random_uuid(), gen_random_uuid(), 'a', jsonb_build_object('i', i),
                coalesce({key}, 'none') || '-' || i, 'pending', '2026-01-01', now() - interval '1 hour', {key}, {due}
           FROM generate_series(1, {n}) i"
    ));
}

#[test]
fn a_pile_that_waits_on_one_key_does_not_hold_up_the_others() {
    let db = TestDb::new();
    let (begun, begins) = unbounded();
    let send = move |entry: &OutboxEntry| {
        begun.send(entry.ordering_key.clone()).unwrap();
        Dispatched::completed()
    };
    // The head of the pile is not due; the others of its key are, and were first.
    put(
        &db,
        row("pile", 0)
            .with_created_at("2025-01-01T00:00:00Z".parse().unwrap())
            .not_before(Utc::now() + TimeDelta::hours(1)),
    );
    many(&db, 20_000, "'pile'", "NULL");
    many(&db, 300, "'key' || i", "now() - interval '1 minute'");
    many(&db, 300, "NULL", "NULL::timestamptz");
    let dispatcher = dispatcher(&db, idempotent("a", send)).start().unwrap();
    let mut keyed = 0;
    for _ in 0..600 {
        if let Some(key) = begins.recv_timeout(SOON).unwrap() {
            assert_ne!(key, "pile");
            keyed += 1;
        }
    }
    assert_eq!(keyed, 300);
    dispatcher.stop(SOON);
    assert_eq!(with_status(&mut db.connect(), "pending"), 20_001);
}

#[test]
fn a_key_that_no_window_shows_gets_its_turn() {
    let db = TestDb::new();
    let (begun, begins) = unbounded();
    let send = move |entry: &OutboxEntry| {
        begun.send(entry.ordering_key.clone().unwrap()).unwrap();
        Dispatched::completed()
    };
    // 2,000 keys whose heads are scheduled and whose second rows came due before
    // and after the only one that can be sent.
    many(&db, 2_000, "'blocked' || i", "now() + interval '1 hour'");
    db.execute(
        "INSERT INTO tf_outbox (outbox_id, command_id, destination, payload, idempotency_key,
                                status, created_at, enqueued_at, ordering_key, next_attempt_at)
         SELECT gen_random_uuid(), gen_random_uuid(), 'a', '{}', 'second-' || ordering_key,
                'pending', '2026-02-01', enqueued_at, ordering_key,
                now() - make_interval(mins => CASE WHEN (payload->>'i')::int % 2 = 0 THEN 50 ELSE 5 END)
           FROM tf_outbox",
    );
    many(&db, 1, "'zz-last'", "now() - interval '20 minutes'");
    let dispatcher = dispatcher(&db, idempotent("a", send)).start().unwrap();
    assert_eq!(begins.recv_timeout(SOON).as_deref(), Ok("zz-last"));
    dispatcher.stop(SOON);
    assert_eq!(with_status(&mut db.connect(), "pending"), 4_000);
}

#[test]
fn run_once_sends_the_rows_of_a_key_to_the_last_and_leaves_what_is_blocked() {
    let db = TestDb::new();
    let mut conn = db.connect();
    let rows: Vec<_> = (1..=20).map(|i| row("key", i)).collect();
    enqueue_all(&mut conn, &rows).unwrap();
    put(
        &db,
        row("blocked", 1).not_before(Utc::now() + TimeDelta::hours(1)),
    );
    put(&db, row("blocked", 2));
    let send = |_: &OutboxEntry| Dispatched::completed();
    let mut sweep = dispatcher(&db, idempotent("a", send)).build().unwrap();
    let stats = sweep.run_once().unwrap();
    assert_eq!((stats.begun, stats.completed), (20, 20));
    assert_eq!(with_status(&mut conn, "pending"), 2);
}

#[test]
fn an_insert_by_any_driver_is_in_order() {
    let db = audited();
    db.connect()
        .batch_execute(
            "INSERT INTO tf_outbox (outbox_id, command_id, destination, payload, idempotency_key,
                                    status, created_at, ordering_key)
             SELECT gen_random_uuid(), gen_random_uuid(), 'a', jsonb_build_object('i', i), i,
                    'pending', now() + make_interval(secs => i), 'é — \"''%_'
               FROM generate_series(1, 10) i",
        )
        .unwrap();
    let send = |_: &OutboxEntry| Dispatched::completed();
    let dispatcher = dispatcher(&db, idempotent("a", send)).start().unwrap();
    let mut conn = db.connect();
    eventually(SOON, "all are completed", || {
        (with_status(&mut conn, "completed") == 10).then_some(())
    });
    dispatcher.stop(stretched(SOON));
    let by_key = moves_by_key(&mut conn);
    assert_in_order("é", &by_key["é — \"'%_"], 10);
}
