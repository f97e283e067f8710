//! Waking an idle dispatcher: no row is missed, and nobody pays for it.
//!
//! With a poll of a minute only a notification, or the look before falling asleep,
//! can find a row in time.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, unbounded};
use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::sql_types::{Integer, Text};
use diesel_outbox::{
    Dispatched, DispatcherBuilder, OutboxEntry, Route, enqueue, enqueue_all, redrive,
};
use serde_json::json;
use support::db::TestDb;
use support::dispatch::{
    SOON, dispatcher, enqueued, i_of, idempotent, ms, rows, until_status, with_status,
};
use support::proxy::{Proxy, port_of};
use support::wait::{eventually, stretched};

const MINUTE: Duration = Duration::from_secs(60);
const SECOND: Duration = Duration::from_secs(1);

/// A dispatcher that only a notification wakes, and what it begins.
fn sleepy(db: &TestDb) -> (DispatcherBuilder, Receiver<u64>) {
    let (begun, begins) = unbounded();
    let send = move |entry: &OutboxEntry| {
        // The test may be over.
        let _ = begun.send(i_of(entry));
        Dispatched::completed()
    };
    let builder = dispatcher(db, idempotent("a", send))
        .with_maintenance_interval(MINUTE)
        .with_poll(MINUTE);
    (builder, begins)
}

#[derive(QueryableByName, Debug)]
struct Backend {
    #[diesel(sql_type = Integer)]
    pid: i32,
}

/// The listening connections of dispatchers that want to be woken.
fn sleepers(conn: &mut PgConnection) -> Vec<i32> {
    diesel::sql_query(
        "SELECT l.pid FROM pg_locks l JOIN pg_database d ON d.oid = l.database
          WHERE d.datname = current_database() AND l.locktype = 'advisory' AND l.granted
            AND l.classid = 7311 AND l.objid = 1 AND l.mode = 'ExclusiveLock'",
    )
    .load::<Backend>(conn)
    .unwrap()
    .into_iter()
    .map(|backend| backend.pid)
    .collect()
}

fn asleep(conn: &mut PgConnection) -> i32 {
    eventually(SOON, "a dispatcher that sleeps", || {
        sleepers(conn).first().copied()
    })
}

/// Waits until nothing is asked of the server any more for a while.
fn quiet(proxy: &Proxy) {
    let (mut before, mut since) = (proxy.statements(), Instant::now());
    eventually(SOON, "a dispatcher that asks nothing", || {
        let now = proxy.statements();
        if now != before {
            (before, since) = (now, Instant::now());
        }
        (since.elapsed() > ms(500)).then_some(())
    });
}

// W3
#[test]
fn a_commit_wakes_an_idle_dispatcher_and_a_rollback_does_not() {
    let db = TestDb::new();
    let (builder, begins) = sleepy(&db);
    let _running = builder.start().unwrap();
    let mut conn = db.connect();
    asleep(&mut conn);
    let batch = rows(2);
    conn.batch_execute("BEGIN").unwrap();
    enqueue(&mut conn, &batch[0]).unwrap();
    assert!(begins.recv_timeout(Duration::from_secs(3)).is_err());
    conn.batch_execute("COMMIT").unwrap();
    assert_eq!(begins.recv_timeout(stretched(SECOND)), Ok(1));
    conn.batch_execute("BEGIN").unwrap();
    enqueue(&mut conn, &batch[1]).unwrap();
    assert!(begins.recv_timeout(Duration::from_secs(3)).is_err());
    conn.batch_execute("ROLLBACK").unwrap();
    assert!(begins.recv_timeout(SECOND).is_err());
    assert_eq!(with_status(&mut conn, "pending"), 0);
}

#[test]
fn a_transaction_that_inserted_before_anybody_wanted_to_sleep_is_waited_for() {
    let db = TestDb::new();
    let mut conn = db.connect();
    // Nobody sleeps yet, so this one does not notify.
    conn.batch_execute("LISTEN tf_outbox; BEGIN").unwrap();
    enqueue(&mut conn, &rows(1)[0]).unwrap();
    let (builder, begins) = sleepy(&db);
    let _running = builder.start().unwrap();
    asleep(&mut db.connect());
    assert!(begins.recv_timeout(SECOND).is_err());
    conn.batch_execute("COMMIT").unwrap();
    assert_eq!(begins.recv_timeout(stretched(SECOND)), Ok(1));
    assert_eq!(conn.notifications_iter().count(), 0);
    // One that comes to a sleeping dispatcher does; this one may be awake still.
    let mut i = 1;
    eventually(SOON, "a notification", || {
        asleep(&mut conn);
        i += 1;
        enqueue(&mut conn, &rows(i)[i - 1]).unwrap();
        assert_eq!(begins.recv_timeout(stretched(SECOND)), Ok(i as u64));
        conn.notifications_iter().next().map(Result::unwrap)
    });
}

// Loaded rows before the start, or short transactions, never show a lost wake-up.
#[test]
fn no_committed_row_waits_a_second_whoever_holds_transactions_open() {
    const WRITERS: u64 = 8;
    let db = TestDb::new();
    let began: Arc<Mutex<HashMap<String, Instant>>> = Arc::default();
    let committed: Arc<Mutex<HashMap<String, Instant>>> = Arc::default();
    let (rolled_back, open_long) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let noting = Arc::clone(&began);
    let send = move |entry: &OutboxEntry| {
        let mut began = noting.lock().unwrap();
        began.insert(entry.idempotency_key.clone(), Instant::now());
        Dispatched::completed()
    };
    let running: Vec<_> = [(); 2]
        .map(|()| {
            dispatcher(&db, idempotent("a", send.clone()))
                .with_maintenance_interval(MINUTE)
                .with_poll(MINUTE)
                .start()
                .unwrap()
        })
        .into();
    asleep(&mut db.connect());
    let end = Instant::now() + MINUTE;
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (committed, rolled_back, open_long) = (&committed, &rolled_back, &open_long);
            let mut conn = db.connect();
            scope.spawn(move || {
                let mut random = Random(0x9e37_79b9 + writer);
                let mut n = 0;
                while Instant::now() < end {
                    n += 1;
                    let key = format!("{writer}-{n}");
                    let entry = OutboxEntry::new("a", &key, &json!({ "i": n })).unwrap();
                    conn.batch_execute("BEGIN").unwrap();
                    enqueue(&mut conn, &entry).unwrap();
                    let hold = ms(random.below(2_000));
                    open_long.fetch_add(usize::from(hold > SECOND), Ordering::Relaxed);
                    // Not for luck: the time that the transaction stays open.
                    std::thread::sleep(hold);
                    if random.below(3) == 0 {
                        conn.batch_execute("ROLLBACK").unwrap();
                        rolled_back.fetch_add(1, Ordering::Relaxed);
                    } else {
                        conn.batch_execute("COMMIT").unwrap();
                        committed.lock().unwrap().insert(key, Instant::now());
                    }
                }
            });
        }
    });
    let committed = committed.lock().unwrap();
    eventually(SOON, "all that was committed is begun", || {
        (began.lock().unwrap().len() >= committed.len()).then_some(())
    });
    for dispatcher in running {
        dispatcher.stop(SOON);
    }
    let began = began.lock().unwrap();
    assert_eq!(began.len(), committed.len());
    for (key, at) in committed.iter() {
        let waited = began[key].saturating_duration_since(*at);
        assert!(waited < stretched(SECOND), "{key} waited {waited:?}");
    }
    // The faults were there: transactions open for long, and rolled back.
    assert!(rolled_back.into_inner() > 20);
    assert!(open_long.into_inner() > 50);
}

/// xorshift64: the same on every run, and different for each writer.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

#[test]
fn an_insert_by_any_driver_wakes() {
    let db = TestDb::new();
    let (builder, begins) = sleepy(&db);
    let _running = builder.start().unwrap();
    asleep(&mut db.connect());
    db.execute(
        "INSERT INTO tf_outbox (outbox_id, command_id, destination, payload, idempotency_key, status, created_at)
         VALUES (gen_random_uuid(), gen_random_uuid(), 'a', '{\"i\": 7}', 'k', 'pending', now())",
    );
    assert_eq!(begins.recv_timeout(stretched(SECOND)), Ok(7));
}

#[test]
fn what_an_operator_puts_back_wakes_and_what_is_due_later_is_woken_for() {
    let db = TestDb::new();
    let (builder, begins) = sleepy(&db);
    let mut conn = db.connect();
    let ids = enqueued(&db, 2);
    db.execute("UPDATE tf_outbox SET status = 'failed', completed_at = now()");
    let _running = builder.start().unwrap();
    asleep(&mut conn);
    redrive(&mut conn, ids[0]).unwrap();
    assert_eq!(begins.recv_timeout(stretched(SECOND)), Ok(1));
    asleep(&mut conn);
    redrive(&mut conn, ids[1]).unwrap();
    assert_eq!(begins.recv_timeout(stretched(SECOND)), Ok(2));
    // A row for later is seen when it is inserted, and slept towards.
    asleep(&mut conn);
    let later = rows(3)
        .remove(2)
        .not_before(chrono::Utc::now() + chrono::TimeDelta::seconds(3));
    let inserted = Instant::now();
    enqueue(&mut conn, &later).unwrap();
    assert_eq!(begins.recv_timeout(SOON), Ok(3));
    let waited = inserted.elapsed();
    assert!(waited > Duration::from_millis(2_900), "{waited:?}");
    assert!(waited < stretched(Duration::from_secs(4)), "{waited:?}");
}

// W5
#[test]
fn one_notification_brings_all_rows_of_its_transaction() {
    let db = TestDb::new();
    let (done, finished) = unbounded();
    let send = move |_: &OutboxEntry| {
        std::thread::sleep(SECOND);
        let _ = done.send(());
        Dispatched::completed()
    };
    let destination = idempotent("a", send).with_concurrency(8);
    let _running = dispatcher(&db, destination)
        .with_poll(MINUTE)
        .start()
        .unwrap();
    let mut conn = db.connect();
    asleep(&mut conn);
    enqueue_all(&mut conn, &rows(8)).unwrap();
    let committed = Instant::now();
    for _ in 0..8 {
        finished.recv_timeout(SOON).unwrap();
    }
    eventually(SOON, "completed", || {
        (with_status(&mut conn, "completed") == 8).then_some(())
    });
    let took = committed.elapsed();
    assert!(took < stretched(Duration::from_millis(2_500)), "{took:?}");
}

// W2
#[test]
fn the_largest_rows_wake_like_any_other() {
    let db = TestDb::new();
    let destination = "é".repeat(100);
    let (begun, begins) = unbounded();
    let send = move |entry: &OutboxEntry| {
        let _ = begun.send(entry.payload.as_str().unwrap().len());
        Dispatched::completed()
    };
    let _running = dispatcher(&db, idempotent(&destination, send))
        .with_poll(MINUTE)
        .start()
        .unwrap();
    let mut conn = db.connect();
    asleep(&mut conn);
    let payload = "x".repeat(900 * 1024);
    let entry = OutboxEntry::new(&destination, "k".repeat(1_000), &payload).unwrap();
    enqueue(&mut conn, &entry).unwrap();
    let within = stretched(Duration::from_secs(2));
    assert_eq!(begins.recv_timeout(within), Ok(payload.len()));
}

#[test]
fn an_idle_dispatcher_asks_less_than_five_times_a_second() {
    let db = TestDb::new();
    let proxy = Proxy::to(port_of(db.url()));
    let (begun, begins) = unbounded();
    let send = move |entry: &OutboxEntry| {
        let _ = begun.send(i_of(entry));
        Dispatched::completed()
    };
    // As it comes, but for the proxy, beside another that sleeps in its place.
    let start = |url: &str| {
        diesel_outbox::Dispatcher::builder(url)
            .destination(idempotent("a", send.clone()))
            .start()
            .unwrap()
    };
    let first = start(db.url());
    asleep(&mut db.connect());
    let second = start(&proxy.url(db.url()));
    enqueued(&db, 1);
    assert_eq!(begins.recv_timeout(SOON), Ok(1));
    let watch = |what: &str| {
        // It may still be falling asleep.
        eventually(SOON, "a quiet second", || {
            let before = proxy.statements();
            std::thread::sleep(SECOND);
            (proxy.statements() - before < 5).then_some(())
        });
        let (before, begun) = (proxy.statements(), Instant::now());
        std::thread::sleep(Duration::from_secs(10));
        let asked = proxy.statements() - before;
        let most = 5.0 * begun.elapsed().as_secs_f64();
        assert!(asked > 5, "{what}: the proxy counted {asked} statements");
        assert!((asked as f64) < most, "{what}: {asked} statements");
    };
    watch("the second");
    first.stop(SOON);
    watch("alone");
    drop(second);
}

// W1
#[test]
fn a_cut_listener_listens_again() {
    let db = TestDb::new();
    let (builder, begins) = sleepy(&db);
    let _running = builder.start().unwrap();
    let mut conn = db.connect();
    let mut last = 0;
    for (round, row) in rows(20).iter().enumerate() {
        let pid = eventually(SOON, "another listener", || {
            sleepers(&mut conn).into_iter().find(|pid| *pid != last)
        });
        db.execute(&format!("SELECT pg_terminate_backend({pid})"));
        // In the gap and after it.
        if round % 2 == 0 {
            eventually(SOON, "listens again", || {
                sleepers(&mut conn).into_iter().find(|new| *new != pid)
            });
        }
        enqueue(&mut conn, row).unwrap();
        let within = stretched(Duration::from_secs(5));
        assert_eq!(begins.recv_timeout(within), Ok(round as u64 + 1));
        last = pid;
    }
    asleep(&mut conn);
    assert_eq!(sleepers(&mut conn).len(), 1);
}

#[test]
fn of_two_idle_dispatchers_both_are_woken() {
    let db = TestDb::new();
    let mut conn = db.connect();
    let (a, a_begins) = sleepy(&db);
    let (begun, b_begins) = unbounded();
    let other = move |entry: &OutboxEntry| {
        let _ = begun.send(i_of(entry));
        Dispatched::completed()
    };
    let _a = a.start().unwrap();
    asleep(&mut conn);
    let _b = dispatcher(&db, idempotent("b", other))
        .with_poll(MINUTE)
        .start()
        .unwrap();
    // Rows that only one of them can take; each in turn holds the lock.
    for i in 1..=20 {
        let destination = if i % 2 == 0 { "a" } else { "b" };
        let entry = OutboxEntry::new(destination, format!("k{i}"), &json!({ "i": i })).unwrap();
        enqueue(&mut conn, &entry).unwrap();
        let begins = if i % 2 == 0 { &a_begins } else { &b_begins };
        assert_eq!(begins.recv_timeout(stretched(SECOND)), Ok(i));
    }
}

#[test]
fn behind_a_transaction_pooler_nothing_is_kept_in_a_session() {
    #[derive(QueryableByName)]
    struct Query {
        #[diesel(sql_type = Text)]
        query: String,
    }
    let db = TestDb::new();
    let (builder, begins) = sleepy(&db);
    let ids = enqueued(&db, 1);
    let _running = builder
        .with_route(Route::TransactionPooler)
        .with_poll(ms(100))
        .start()
        .unwrap();
    let mut conn = db.connect();
    assert_eq!(begins.recv_timeout(SOON), Ok(1));
    until_status(&mut conn, ids[0], diesel_outbox::OutboxStatus::Completed);
    enqueue(&mut conn, &rows(2)[1]).unwrap();
    assert_eq!(begins.recv_timeout(stretched(SECOND)), Ok(2));
    assert_eq!(sleepers(&mut conn), Vec::<i32>::new());
    let listening = diesel::sql_query(
        "SELECT query FROM pg_stat_activity
          WHERE datname = current_database() AND pid <> pg_backend_pid() AND query ILIKE '%listen%'",
    )
    .load::<Query>(&mut conn)
    .unwrap();
    assert!(listening.is_empty(), "{}", listening[0].query);
}

#[test]
fn with_poll_of_a_minute_an_idle_dispatcher_asks_nothing() {
    let db = TestDb::new();
    let proxy = Proxy::to(port_of(db.url()));
    let (begun, begins) = unbounded();
    let send = move |entry: &OutboxEntry| {
        let _ = begun.send(i_of(entry));
        Dispatched::completed()
    };
    let _running = diesel_outbox::Dispatcher::builder(&proxy.url(db.url()))
        .destination(idempotent("a", send))
        .with_poll(MINUTE)
        .with_maintenance_interval(MINUTE)
        .start()
        .unwrap();
    asleep(&mut db.connect());
    quiet(&proxy);
    let before = proxy.statements();
    assert!(before > 0);
    std::thread::sleep(Duration::from_secs(3));
    assert!(proxy.statements() - before <= 1);
    enqueued(&db, 1);
    assert_eq!(begins.recv_timeout(stretched(SECOND)), Ok(1));
}
