//! Stopping: by the deadline, whatever hangs, and with a report that is true.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::collections::HashSet;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use crossbeam_channel::unbounded;
use diesel_outbox::{
    Destination, Dispatched, Dispatcher, DispatcherHandle, OutboxEntry, OutboxId, OutboxStatus,
    StopReport, code, get,
};
use support::db::TestDb;
use support::dispatch::{
    SOON, dispatcher, enqueued, gated, i_of, idempotent, ms, until_status, with_status,
};
use support::process::{Child, role, say};
use support::server::{Server, StopMode};
use support::wait::{eventually, stretched};

const SECOND: Duration = Duration::from_secs(1);

/// Stops and checks that it took no longer than was promised.
fn stopped(running: &DispatcherHandle, deadline: Duration) -> StopReport {
    let asked = Instant::now();
    let report = running.stop(deadline);
    let took = asked.elapsed();
    assert!(took <= deadline + stretched(SECOND), "{took:?}");
    report
}

#[test]
fn an_idle_dispatcher_stops_at_once_and_a_second_stop_says_the_same() {
    let db = TestDb::new();
    let running = dispatcher(&db, idempotent("a", |_| Dispatched::completed()))
        .start()
        .unwrap();
    let id = enqueued(&db, 1)[0];
    until_status(&mut db.connect(), id, OutboxStatus::Completed);
    let asked = Instant::now();
    let report = running.stop(SOON);
    assert!(asked.elapsed() < stretched(SECOND));
    assert_eq!(report, StopReport::default());
    assert_eq!(stopped(&running, Duration::ZERO), report);
}

#[test]
fn a_dispatcher_stops_while_it_starts() {
    let db = TestDb::new();
    for _ in 0..20 {
        enqueued_again(&db);
        let running = dispatcher(&db, idempotent("a", |_| Dispatched::completed()))
            .start()
            .unwrap();
        let report = stopped(&running, SECOND);
        assert_eq!((report.left_unknown, report.unsettled), (0, 0));
        assert_eq!(report.blocked, Vec::<&str>::new());
    }
    assert_eq!(with_status(&mut db.connect(), "dispatching"), 0);
}

fn enqueued_again(db: &TestDb) {
    db.execute("DELETE FROM tf_outbox");
    enqueued(db, 10);
}

#[test]
fn a_dispatcher_whose_server_was_never_there_stops_in_time() {
    // Nobody listens on this port: it was free a moment ago.
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let running = Dispatcher::builder(&format!("postgres://x@127.0.0.1:{port}/x"))
        .destination(idempotent("a", |_| Dispatched::completed()))
        .start()
        .unwrap();
    let report = stopped(&running, ms(500));
    assert_eq!(report, StopReport::default());
}

// D1
#[test]
fn a_stop_finishes_what_runs_and_hands_back_the_rest_untouched() {
    let db = TestDb::new();
    let (send, arrivals, answer) = gated();
    let destination = idempotent("a", send).with_concurrency(2).with_prefetch(18);
    let running = dispatcher(&db, destination).start().unwrap();
    let ids = enqueued(&db, 20);
    for _ in 0..2 {
        arrivals.recv_timeout(SOON).unwrap();
    }
    eventually(SOON, "all claimed", || {
        (running.stats().claimed == 20).then_some(())
    });
    let mut conn = db.connect();
    let beside = std::thread::scope(|scope| {
        let stopping = scope.spawn(|| stopped(&running, SOON));
        eventually(SOON, "18 handed back", || {
            (with_status(&mut conn, "pending") == 18).then_some(())
        });
        for id in &ids {
            let record = get(&mut conn, *id).unwrap();
            if record.entry.status == OutboxStatus::Pending {
                assert_eq!((record.entry.attempt_count, record.claim), (0, None));
            }
        }
        // Another takes them at once, while this one still waits for its calls.
        let beside = dispatcher(&db, idempotent("a", |_| Dispatched::completed()))
            .start()
            .unwrap();
        eventually(2 * SECOND, "18 completed by the other", || {
            (with_status(&mut conn, "completed") == 18).then_some(())
        });
        for _ in 0..2 {
            answer.send(Dispatched::completed()).unwrap();
        }
        let report = stopping.join().unwrap();
        assert_eq!((report.finished, report.handed_back), (2, 18));
        assert_eq!(
            (report.left_unknown, report.left_running, report.unsettled),
            (0, 0, 0)
        );
        assert_eq!(report.blocked, Vec::<&str>::new());
        beside
    });
    assert_eq!(running.stats().begun, 2);
    assert_eq!(beside.stats().begun, 18);
    assert_eq!(with_status(&mut conn, "completed"), 20);
}

#[test]
fn a_stop_leaves_a_hung_call_as_unknown_and_returns_in_time() {
    let db = TestDb::new();
    let (send, arrivals, _answer) = gated();
    let running = dispatcher(&db, Destination::manual("a", send))
        .start()
        .unwrap();
    let ids = enqueued(&db, 1);
    arrivals.recv_timeout(SOON).unwrap();
    let report = stopped(&running, ms(300));
    assert_eq!((report.left_unknown, report.left_running), (1, 1));
    let record = get(&mut db.connect(), ids[0]).unwrap();
    assert_eq!(record.entry.status, OutboxStatus::OutcomeUnknown);
    assert_eq!(record.last_failure.as_deref(), Some(code::STOPPED));
}

#[test]
fn a_stop_without_its_database_names_what_it_could_not_write() {
    let server = Server::start();
    let db = TestDb::on(&server);
    let (send, arrivals, answer) = gated();
    let running = dispatcher(&db, idempotent("a", send).with_concurrency(2))
        .start()
        .unwrap();
    enqueued(&db, 2);
    for _ in 0..2 {
        arrivals.recv_timeout(SOON).unwrap();
    }
    server.stop(StopMode::Immediate);
    answer.send(Dispatched::completed()).unwrap();
    let report = stopped(&running, SECOND);
    // One has answered and one hangs: neither outcome could be written.
    assert_eq!(
        (report.finished, report.left_unknown, report.unsettled),
        (0, 1, 2)
    );
    assert_eq!(report.left_running, 1);
    assert_eq!(report.blocked, Vec::<&str>::new());
    drop(answer);
    server.start_again();
}

#[test]
fn a_sender_may_stop_its_own_dispatcher() {
    let db = TestDb::new();
    let handle: Arc<OnceLock<DispatcherHandle>> = Arc::default();
    let (reported, reports) = unbounded();
    let own = Arc::clone(&handle);
    let send = move |_: &OutboxEntry| {
        let running = eventually(SOON, "the handle", || own.get());
        let _ = reported.send(stopped(running, ms(500)));
        Dispatched::completed()
    };
    let running = dispatcher(&db, idempotent("a", send)).start().unwrap();
    handle.set(running).unwrap();
    let id = enqueued(&db, 1)[0];
    // It cannot wait for itself: its own call is left unknown.
    let report = reports.recv_timeout(SOON).unwrap();
    assert_eq!((report.finished, report.left_unknown), (0, 1));
    let record = get(&mut db.connect(), id).unwrap();
    assert_eq!(record.entry.status, OutboxStatus::OutcomeUnknown);
}

// D2
#[test]
fn what_answered_before_a_stop_is_completed_whenever_it_comes() {
    let db = TestDb::new();
    let mut conn = db.connect();
    for round in 0..50 {
        db.execute("DELETE FROM tf_outbox");
        let ids = enqueued(&db, 100);
        let answered: Arc<Mutex<HashSet<OutboxId>>> = Arc::default();
        let begun_late = Arc::new(Mutex::new(None::<Instant>));
        let (seen, last_begin) = (Arc::clone(&answered), Arc::clone(&begun_late));
        let send = move |entry: &OutboxEntry| {
            *last_begin.lock().unwrap() = Some(Instant::now());
            std::thread::sleep(ms(10));
            seen.lock().unwrap().insert(entry.outbox_id);
            Dispatched::completed()
        };
        let running = dispatcher(&db, idempotent("a", send)).start().unwrap();
        std::thread::sleep(Duration::from_micros(round * 3_000));
        let asked = Instant::now();
        let report = stopped(&running, SOON);
        assert_eq!(
            (report.left_unknown, report.unsettled),
            (0, 0),
            "{report:?}"
        );
        let answered = answered.lock().unwrap();
        for id in ids {
            let status = get(&mut conn, id).unwrap().entry.status;
            let expected = match answered.contains(&id) {
                true => OutboxStatus::Completed,
                false => OutboxStatus::Pending,
            };
            assert_eq!(status, expected);
        }
        // A worker may be between its last look and the call.
        if let Some(last) = *begun_late.lock().unwrap() {
            assert!(
                last < asked + ms(10),
                "begun {:?} after the stop",
                last - asked
            );
        }
    }
}

/// The threads of this process that the crate has started.
fn own_threads() -> Vec<String> {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else {
        return Vec::new();
    };
    tasks
        .flatten()
        .filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok())
        .map(|name| name.trim().to_owned())
        .filter(|name| name.starts_with("outbox-"))
        .collect()
}

/// Starts and ends dispatchers by every way there is, and says what threads are
/// left, in a process where nobody else starts any.
#[test]
fn ending() {
    role("ending", || {
        let url = std::env::var("OUTBOX").unwrap();
        let start = || {
            Dispatcher::builder(&url)
                .destination(idempotent("a", |_| Dispatched::completed()))
                .start()
                .unwrap()
        };
        for way in ["stop", "drop", "twice", "notified"] {
            let running = start();
            eventually(SOON, "a row that is sent", || {
                (running.stats().completed > 0 || way != "stop").then_some(())
            });
            eventually(SOON, "threads to be ended", || {
                (!own_threads().is_empty()).then_some(())
            });
            let asked = Instant::now();
            match way {
                "drop" => drop(running),
                "notified" => std::thread::scope(|scope| {
                    let stopping = scope.spawn(|| running.stop(SOON));
                    for _ in 0..20 {
                        running.nudge();
                    }
                    stopping.join().unwrap();
                }),
                _ => {
                    running.stop(SOON);
                    running.stop(SOON);
                }
            }
            assert!(asked.elapsed() < stretched(Duration::from_secs(5)));
            // Workers that were idle are on their way out.
            eventually(SECOND, &format!("no threads after {way}"), || {
                own_threads().is_empty().then_some(())
            });
        }
        say("ended");
    });
}

// D3
#[test]
fn no_thread_is_left_whatever_way_a_dispatcher_ends() {
    let db = TestDb::new();
    enqueued(&db, 5);
    let mut child = Child::spawn("ending", &[("OUTBOX", db.url())]);
    child.wait_line("ended", 2 * SOON);
    assert!(child.wait_exit(SOON).success());
}

// L8
#[test]
fn a_signal_lets_a_call_end_under_a_lease_that_is_renewed() {
    let db = TestDb::new();
    let mark = tempfile::NamedTempFile::new().unwrap();
    let path = mark.path().display().to_string();
    let command = "printf x >> \"$0\"; sleep 8";
    let mut first = Child::spawn_example(
        "worker",
        &["a", "sh", "-c", command, &path],
        &[
            ("DATABASE_URL", db.url()),
            ("OUTBOX_LEASE_SECONDS", "2"),
            ("OUTBOX_KIND", "idempotent"),
        ],
    );
    first.wait_line("working as", SOON);
    let id = enqueued(&db, 1)[0];
    let calls = || std::fs::read_to_string(mark.path()).unwrap().len();
    eventually(SOON, "a call", || (calls() == 1).then_some(()));
    let _second = dispatcher(&db, idempotent("a", |_| Dispatched::completed()))
        .start()
        .unwrap();
    std::thread::sleep(SECOND);
    let told = Instant::now();
    first.sigterm();
    assert!(first.wait_exit(Duration::from_secs(12)).success());
    let took = told.elapsed();
    assert!(took >= Duration::from_millis(6_500), "{took:?}");
    assert!(took <= stretched(Duration::from_secs(10)), "{took:?}");
    let record = get(&mut db.connect(), id).unwrap();
    assert_eq!(record.entry.status, OutboxStatus::Completed);
    assert_eq!((record.entry.attempt_count, calls()), (1, 1));
}

/// The claim that is under way when the stop comes brings rows yet.
#[test]
fn rows_that_are_being_claimed_are_handed_back_too() {
    let db = TestDb::new();
    db.execute(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS
             'BEGIN PERFORM pg_sleep(0.8); RETURN NULL; END';
         CREATE TRIGGER slow AFTER UPDATE ON tf_outbox FOR EACH STATEMENT
             WHEN (current_setting('application_name') = 'diesel-outbox-claimer')
             EXECUTE FUNCTION slow()",
    );
    let running = dispatcher(&db, idempotent("a", |_| Dispatched::completed()))
        .start()
        .unwrap();
    let ids = enqueued(&db, 3);
    let sleeping = "SELECT pid::text AS line FROM pg_stat_activity
                     WHERE datname = current_database() AND wait_event = 'PgSleep'";
    let mut conn = db.connect();
    eventually(SOON, "a claim under way", || {
        (!support::catalog::strings(&mut conn, sleeping).is_empty()).then_some(())
    });
    let report = stopped(&running, SOON);
    assert_eq!((report.handed_back, report.finished), (3, 0));
    for id in ids {
        let record = get(&mut conn, id).unwrap();
        assert_eq!(record.entry.status, OutboxStatus::Pending);
        assert_eq!(record.entry.attempt_count, 0);
    }
    assert_eq!(running.stats().begun, 0);
}

/// Rows that wait for a worker are handed back before the deadline, however long
/// the calls take.
#[test]
fn handing_back_does_not_wait_for_calls() {
    let db = TestDb::new();
    let (send, arrivals, answer) = gated();
    let running = dispatcher(
        &db,
        idempotent("a", send).with_concurrency(1).with_prefetch(5),
    )
    .start()
    .unwrap();
    enqueued(&db, 6);
    assert_eq!(arrivals.recv_timeout(SOON), Ok(1));
    eventually(SOON, "all claimed", || {
        (running.stats().claimed == 6).then_some(())
    });
    let mut conn = db.connect();
    std::thread::scope(|scope| {
        scope.spawn(|| stopped(&running, SOON));
        eventually(2 * SECOND, "five handed back", || {
            (with_status(&mut conn, "pending") == 5).then_some(())
        });
        assert!(arrivals.try_recv().is_err());
        answer.send(Dispatched::completed()).unwrap();
    });
    assert_eq!(i_of_first(&db), 1);
}

fn i_of_first(db: &TestDb) -> u64 {
    use diesel::prelude::*;
    use diesel_outbox::schema::tf_outbox;
    let payload: serde_json::Value = tf_outbox::table
        .filter(tf_outbox::status.eq("completed"))
        .select(tf_outbox::payload)
        .get_result(&mut db.connect())
        .unwrap();
    i_of(&OutboxEntry::new("a", "k", &payload).unwrap())
}
