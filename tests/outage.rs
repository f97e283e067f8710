//! The dispatcher without its database, and after.
//!
//! Lines of the log are counted, so every test here captures them.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crossbeam_channel::unbounded;
use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel_outbox::schema::tf_outbox;
use diesel_outbox::{
    Backoff, Destination, Dispatched, Dispatcher, DispatcherBuilder, OutboxEntry, OutboxId,
    OutboxRecord, OutboxStatus, OutboxWriter, PgOutbox, Reconciled, StoreError, enqueue, get,
};
use serde_json::json;
use support::db::TestDb;
use support::dispatch::{
    SOON, dispatcher, enqueued, idempotent, ms, rows, until_status, with_status,
};
use support::logs::Logs;
use support::proxy::Proxy;
use support::server::{Server, StopMode};
use support::wait::{eventually, stretched};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

/// What an idempotent remote has seen: calls by key.
#[derive(Clone, Debug, Default)]
struct Remote(Arc<Mutex<HashMap<String, usize>>>);

impl Remote {
    fn called(&self, entry: &OutboxEntry) {
        let mut calls = self.0.lock().unwrap();
        *calls.entry(entry.idempotency_key.clone()).or_default() += 1;
    }

    /// Distinct keys, and all calls.
    fn effects_and_calls(&self) -> (usize, usize) {
        let calls = self.0.lock().unwrap();
        (calls.len(), calls.values().sum())
    }
}

/// Commits `entry` whatever happens to the server meanwhile, by the contract: what
/// was unavailable is tried again, what timed out is read again.
fn enqueue_in_the_end(url: &str, entry: &OutboxEntry) {
    let mut conn: Option<PgConnection> = None;
    let mut unsure = false;
    eventually(MINUTE, "a row that is committed", || {
        let mut open = match conn.take() {
            Some(open) => open,
            None => PgConnection::establish(url).ok()?,
        };
        if unsure {
            match get(&mut open, entry.outbox_id) {
                Ok(_) => return Some(()),
                Err(StoreError::NotFound) => unsure = false,
                Err(_) => return None,
            }
        }
        // In autocommit its statement is its commit.
        match enqueue(&mut open, entry) {
            Ok(()) => return Some(()),
            Err(StoreError::Timeout) => unsure = true,
            Err(StoreError::Unavailable) => {}
            Err(error) => panic!("{error}"),
        }
        None
    });
}

#[test]
fn a_server_restarted_under_load_loses_and_doubles_nothing() {
    let logs = Logs::capture();
    let server = Server::start();
    let db = TestDb::on(&server);
    let remote = Remote::default();
    let start = || {
        let remote = remote.clone();
        let send = move |entry: &OutboxEntry| {
            std::thread::sleep(ms(5));
            remote.called(entry);
            Dispatched::completed()
        };
        // A claim whose COMMIT was lost is found by its lease.
        dispatcher(&db, idempotent("a", send))
            .with_lease(Duration::from_secs(2))
            .start()
            .unwrap()
    };
    let running = [start(), start()];
    let entries = rows(1_200);
    std::thread::scope(|scope| {
        for quarter in entries.chunks(300) {
            let url = db.url();
            scope.spawn(move || {
                for entry in quarter {
                    enqueue_in_the_end(url, entry);
                    std::thread::sleep(ms(5));
                }
            });
        }
        let modes = [StopMode::Fast, StopMode::Immediate, StopMode::Fast];
        for (round, mode) in modes.into_iter().enumerate() {
            eventually(MINUTE, "calls", || {
                (remote.effects_and_calls().1 > 250 * (round + 1)).then_some(())
            });
            server.restart(mode);
        }
    });
    let mut conn = db.connect();
    eventually(MINUTE, "all completed", || {
        (with_status(&mut conn, "completed") == 1_200).then_some(())
    });
    let (effects, calls) = remote.effects_and_calls();
    assert_eq!(effects, 1_200);
    assert!(calls >= effects);
    for log in ["fast shutdown request", "immediate shutdown request"] {
        assert!(server.log().contains(log), "the fault did not fire: {log}");
    }
    // Each of five roles of two dispatchers, once an outage.
    let warnings = logs.our_warnings();
    assert!(!warnings.is_empty());
    assert!(warnings.len() <= 3 * 2 * 6, "{warnings:#?}");
    drop(running);
}

// E10
#[test]
fn a_table_that_is_gone_for_a_while_costs_a_few_lines_and_nothing_else() {
    let logs = Logs::capture();
    let db = TestDb::new();
    let outbox = PgOutbox::builder(db.url()).build().unwrap();
    let running = dispatcher(&db, idempotent("a", |_| Dispatched::completed()))
        .start()
        .unwrap();
    let mut conn = db.connect();
    let entries = rows(3);
    outbox.enqueue(&entries[0]).unwrap();
    until_status(&mut conn, entries[0].outbox_id, OutboxStatus::Completed);

    db.execute("ALTER TABLE tf_outbox RENAME TO tf_gone");
    let gone = Instant::now();
    let mut refusals = 0;
    while gone.elapsed() < Duration::from_secs(10) {
        match outbox.enqueue(&entries[1]) {
            Err(StoreError::Other { code, .. }) => {
                assert_eq!(code, "turnframe.store.postgres.other");
                refusals += 1;
            }
            other => panic!("{other:?}"),
        }
        std::thread::sleep(ms(500));
    }
    assert!(refusals > 5);
    db.execute("ALTER TABLE tf_gone RENAME TO tf_outbox");
    outbox.enqueue(&entries[2]).unwrap();
    let back = Instant::now();
    until_status(&mut conn, entries[2].outbox_id, OutboxStatus::Completed);
    assert!(back.elapsed() < stretched(Duration::from_secs(5)));
    assert!(!logs.our_warnings().is_empty(), "the fault did not fire");
    assert!(logs.busiest_second() <= 3, "{:#?}", logs.our_warnings());
    assert_eq!(running.stats().begun, 2);
}

fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(
        time.tv_sec.unsigned_abs(),
        u32::try_from(time.tv_nsec).unwrap(),
    )
}

/// Nobody gets in but the superuser of the database beside.
fn shut_out(db: &TestDb, whether: bool) {
    let mut outside = db.connect_outside();
    outside
        .batch_execute(&format!(
            "ALTER DATABASE {} ALLOW_CONNECTIONS {}",
            db.name(),
            !whether
        ))
        .unwrap();
    if whether {
        let terminate = format!(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{}'",
            db.name()
        );
        let terminated = diesel::sql_query(terminate).execute(&mut outside).unwrap();
        assert!(terminated >= 3, "the dispatcher's own connections");
    }
}

// W4
#[test]
fn a_database_that_lets_nobody_in_is_waited_for_without_a_busy_loop() {
    let logs = Logs::capture();
    let db = TestDb::new();
    let _running = dispatcher(&db, idempotent("a", |_| Dispatched::completed()))
        .start()
        .unwrap();
    let first = enqueued(&db, 1)[0];
    until_status(&mut db.connect(), first, OutboxStatus::Completed);

    shut_out(&db, true);
    let (processor, begun) = (processor_time(), Instant::now());
    std::thread::sleep(Duration::from_secs(20));
    let share = (processor_time() - processor).as_secs_f64() / begun.elapsed().as_secs_f64();
    let lines = logs.our_warnings();
    shut_out(&db, false);

    assert!(!lines.is_empty(), "the fault did not fire");
    assert!(lines.len() <= 60, "{lines:#?}");
    assert!(share < 0.2, "{share} of a core");
    let row = OutboxEntry::new("a", "k2", &json!({ "i": 2 })).unwrap();
    let mut conn = db.connect();
    enqueue(&mut conn, &row).unwrap();
    let enqueued = Instant::now();
    until_status(&mut conn, row.outbox_id, OutboxStatus::Completed);
    assert!(enqueued.elapsed() < stretched(Duration::from_secs(5)));
}

// W6
#[test]
fn a_server_that_is_down_at_the_start_is_waited_for_and_listened_to() {
    let logs = Logs::capture();
    let server = Server::start();
    let db = TestDb::on(&server);
    server.stop(StopMode::Fast);
    let (builder, begun) = recording(&db);
    let running = builder
        .with_poll(MINUTE)
        .with_maintenance_interval(MINUTE)
        .start()
        .unwrap();
    std::thread::sleep(Duration::from_secs(10));
    assert!(!logs.our_warnings().is_empty(), "the fault did not fire");
    server.start_again();
    std::thread::sleep(Duration::from_secs(5));
    enqueued(&db, 1);
    assert!(
        begun
            .recv_timeout(stretched(Duration::from_secs(2)))
            .is_ok(),
        "found by the poll of a minute, if at all"
    );
    assert!(running.stop(SOON).blocked.is_empty());
}

fn recording(db: &TestDb) -> (DispatcherBuilder, crossbeam_channel::Receiver<OutboxId>) {
    let (begun, begins) = unbounded();
    let send = move |entry: &OutboxEntry| {
        let _ = begun.send(entry.outbox_id);
        Dispatched::completed()
    };
    (dispatcher(db, idempotent("a", send)), begins)
}

// S10
#[test]
fn answers_wait_for_a_server_that_only_reads_for_a_while() {
    let _logs = Logs::capture();
    let server = Server::start();
    let db = TestDb::on(&server);
    let (begun, begins) = unbounded();
    let send = move |entry: &OutboxEntry| {
        let _ = begun.send(entry.outbox_id);
        std::thread::sleep(Duration::from_secs(2));
        Dispatched::completed()
    };
    let running = dispatcher(&db, idempotent("a", send).with_concurrency(20))
        .with_batch(20)
        .start()
        .unwrap();
    let ids = enqueued(&db, 20);
    for _ in 0..20 {
        begins.recv_timeout(SOON).unwrap();
    }
    let flipped = Instant::now();
    server.reload("default_transaction_read_only", "on");
    let mut conn = db.connect();
    let while_reading = |conn: &mut PgConnection| with_status(conn, "dispatching");
    std::thread::sleep(Duration::from_secs(30).saturating_sub(flipped.elapsed()));
    assert_eq!(while_reading(&mut conn), 20, "the fault did not fire");
    server.reload("default_transaction_read_only", "off");
    let back = Instant::now();
    for id in ids {
        let record: OutboxRecord = until_status(&mut conn, id, OutboxStatus::Completed);
        assert_eq!(record.entry.attempt_count, 1);
    }
    assert!(back.elapsed() < stretched(Duration::from_secs(10)));
    assert_eq!((begins.try_iter().count(), running.stats().begun), (0, 20));
}

/// The settler tries until the claim lapses, and once more.
#[test]
fn an_answer_that_cannot_be_written_in_time_is_an_unknown_outcome() {
    let logs = Logs::capture();
    let server = Server::start();
    let db = TestDb::on(&server);
    let proxy = Proxy::to(server.port());
    let calls = Arc::new(AtomicUsize::new(0));
    let (send, arrivals, answer) = support::dispatch::gated();
    let counted = Arc::clone(&calls);
    let destination = idempotent("a", move |entry: &OutboxEntry| {
        counted.fetch_add(1, Ordering::SeqCst);
        send(entry)
    });
    let running = Dispatcher::builder(&proxy.url(db.url()))
        .destination(destination)
        .with_maintenance_interval(ms(200))
        .with_lease(SECOND)
        .start()
        .unwrap();
    let id = enqueued(&db, 1)[0];
    arrivals.recv_timeout(SOON).unwrap();
    proxy.refuse();
    answer.send(Dispatched::completed()).unwrap();
    eventually(SOON, "an answer that is given up", || {
        (running.stats().lost_claims == 1).then_some(())
    });
    assert!(proxy.fired() > 0);
    let mut conn = db.connect();
    let record = get(&mut conn, id).unwrap();
    assert_eq!(record.entry.status, OutboxStatus::Dispatching);
    assert_eq!(running.stats().completed, 0);

    proxy.heal();
    // Lapsed, put back with the same key, and called again.
    arrivals.recv_timeout(stretched(SOON)).unwrap();
    answer.send(Dispatched::completed()).unwrap();
    let record = until_status(&mut conn, id, OutboxStatus::Completed);
    assert_eq!((record.entry.attempt_count, record.lapse_count), (2, 0));
    assert_eq!(calls.load(Ordering::SeqCst), 2);
    assert!(logs.busiest_second() <= 6);
}

/// An outage shorter than the lease costs nothing: the answer is kept.
#[test]
fn an_answer_is_written_when_the_server_is_back_before_the_lease_is_over() {
    let _logs = Logs::capture();
    let server = Server::start();
    let db = TestDb::on(&server);
    let proxy = Proxy::to(server.port());
    let (send, arrivals, answer) = support::dispatch::gated();
    let running = Dispatcher::builder(&proxy.url(db.url()))
        .destination(idempotent("a", send))
        .start()
        .unwrap();
    let id = enqueued(&db, 1)[0];
    arrivals.recv_timeout(SOON).unwrap();
    proxy.refuse();
    answer.send(Dispatched::completed()).unwrap();
    let fired = proxy.fired();
    eventually(SOON, "a settler that was refused", || {
        (proxy.fired() > fired + 5).then_some(())
    });
    proxy.heal();
    let record = until_status(&mut db.connect(), id, OutboxStatus::Completed);
    assert_eq!((record.entry.attempt_count, record.lapse_count), (1, 0));
    assert_eq!(running.stats().begun, 1);
}

/// Whatever a row may meet: every kind of answer, of destination and of end.
fn destinations() -> [Destination; 4] {
    let backoff = || Backoff::exponential(ms(50), SECOND).with_jitter(0.0);
    let send = |entry: &OutboxEntry| match entry.payload["i"].as_u64() {
        Some(1) => Dispatched::retryable("SECRETMSG is no code"),
        Some(2) => Dispatched::permanent("SECRETMSG ".repeat(1_000)),
        Some(3) => panic!("SECRETMSG {}", entry.payload),
        Some(4) => Dispatched::unknown(),
        Some(5) => {
            std::thread::sleep(ms(500));
            Dispatched::Completed {
                remote_ref: Some("SECRETMSG\0".to_owned()),
            }
        }
        _ => Dispatched::completed(),
    };
    let asked = AtomicUsize::new(0);
    let reconcile = move |record: &OutboxRecord| match asked.fetch_add(1, Ordering::SeqCst) {
        0 => panic!("SECRETMSG {}", record.entry.payload),
        1 => Reconciled::Unresolved,
        2 => Reconciled::Failed {
            code: "SECRETMSG is no code".to_owned(),
        },
        _ => Reconciled::Completed,
    };
    [
        Destination::idempotent("SECRETDEST-i", send),
        Destination::reconciled("SECRETDEST-r", send, reconcile),
        Destination::manual("SECRETDEST-m", send),
        Destination::idempotent("SECRETDEST-k", send).with_concurrency(1),
    ]
    .map(|destination| {
        destination
            .with_backoff(backoff())
            .with_probe_backoff(backoff())
            .with_send_timeout(ms(200))
            .with_max_attempts(3)
    })
}

/// Rows for all of them, keyed and not.
fn enqueue_everything(conn: &mut PgConnection, round: usize) {
    for destination in ["i", "r", "m", "k"] {
        for i in 0..7 {
            let entry = OutboxEntry::new(
                format!("SECRETDEST-{destination}"),
                format!("SECRETKEY-{round}-{i}"),
                &json!({ "i": i, "card": "SECRETPAY" }),
            )
            .unwrap();
            let entry = match destination {
                // Behind an outcome that stays unknown its key would wait for ever.
                "k" if i != 3 && i != 4 => entry.ordering_key(format!("SECRETORDER-{}", i % 2)),
                _ => entry,
            };
            enqueue(conn, &entry).unwrap();
        }
    }
}

/// Nothing of ours is on its way any more.
fn until_settled(conn: &mut PgConnection) {
    eventually(MINUTE, "an end of all rows", || {
        let moving: i64 = tf_outbox::table
            .filter(tf_outbox::status.eq_any(["pending", "dispatching"]))
            .count()
            .get_result(conn)
            .ok()?;
        (moving == 0).then_some(())
    });
}

// Q6, X1
#[test]
fn a_run_over_everything_draws_no_warning_from_the_server_and_logs_no_secret() {
    const CANARIES: [&str; 6] = [
        "SECRETDEST",
        "SECRETKEY",
        "SECRETPAY",
        "SECRETMSG",
        "SECRETORDER",
        "hunter2",
    ];
    let logs = Logs::capture();
    let server = Server::start();
    let db = TestDb::on(&server);
    db.execute("CREATE ROLE app SUPERUSER LOGIN PASSWORD 'hunter2'");
    let url = format!(
        "postgres://app:hunter2@127.0.0.1:{}/{}",
        server.port(),
        db.name()
    );
    let mut builder = Dispatcher::builder(&url)
        .with_maintenance_interval(ms(100))
        .with_lease(SECOND);
    for destination in destinations() {
        let shown = format!("{destination:?}");
        assert!(CANARIES.iter().all(|canary| !shown.contains(canary)));
        builder = builder.destination(destination);
    }
    let shown = format!("{builder:?}");
    let mut conn = db.connect();

    enqueue_everything(&mut conn, 1);
    let mut once = builder.clone().build().unwrap();
    once.run_once().unwrap();
    enqueue_everything(&mut conn, 2);
    let running = builder.start().unwrap();
    until_settled(&mut conn);

    // Reconnected, by all of its threads.
    let mut outside = db.connect_outside();
    let terminated = diesel::sql_query(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
          WHERE application_name LIKE 'diesel-outbox%'",
    )
    .execute(&mut outside)
    .unwrap();
    assert!(terminated >= 4, "{terminated}");
    enqueue_everything(&mut conn, 3);
    until_settled(&mut conn);
    // And kept out by a password that has changed.
    db.execute("ALTER ROLE app PASSWORD 'other'");
    diesel::sql_query(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
          WHERE application_name LIKE 'diesel-outbox%'",
    )
    .execute(&mut outside)
    .unwrap();
    eventually(SOON, "a refused password", || {
        server
            .log()
            .contains("password authentication failed")
            .then_some(())
    });
    let shown = format!("{shown} {running:?} {:?}", running.stats());
    let stats = running.stats();
    assert!(
        stats.panics > 0 && stats.timeouts > 0 && stats.probes > 3,
        "{stats:?}"
    );
    let report = running.stop(SOON);
    let shown = format!("{shown} {report:?}");

    let log = server.log();
    let warnings: Vec<&str> = log.lines().filter(|l| l.contains("WARNING")).collect();
    assert_eq!(warnings, Vec::<&str>::new());
    assert!(!logs.our_warnings().is_empty());
    for canary in CANARIES {
        assert!(!shown.contains(canary), "{shown}");
        logs.assert_without(canary);
    }
}
