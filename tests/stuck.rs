//! Silent servers and stuck senders: whoever waits does so with a deadline.
//!
//! A lease of three seconds makes the deadline of a session three seconds.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::time::{Duration, Instant};

use crossbeam_channel::unbounded;
use diesel::prelude::*;
use diesel::sql_types::Integer;
use diesel_outbox::{
    Destination, Dispatched, Dispatcher, DispatcherBuilder, OutboxEntry, OutboxStatus, Pause,
    enqueue, enqueue_all, get,
};
use serde_json::json;
use support::db::TestDb;
use support::dispatch::{
    SOON, enqueued, gated, i_of, idempotent, ms, rows, until_status, with_status,
};
use support::proxy::Proxy;
use support::server::Server;
use support::wait::{eventually, stretched};

const SECOND: Duration = Duration::from_secs(1);
/// See the module.
const DEADLINE: Duration = Duration::from_secs(3);

/// Nothing runs of its own accord but what a row or a call brings about.
fn quiet(url: &str, destination: Destination) -> DispatcherBuilder {
    Dispatcher::builder(url)
        .destination(destination)
        .with_lease(3 * DEADLINE)
        .with_maintenance_interval(Duration::from_secs(600))
}

/// The sessions of one role of dispatchers.
fn sessions(conn: &mut PgConnection, role: &str) -> Vec<i32> {
    #[derive(QueryableByName)]
    struct Session {
        #[diesel(sql_type = Integer)]
        pid: i32,
    }
    diesel::sql_query(format!(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database()
            AND application_name = 'diesel-outbox-{role}' ORDER BY backend_start"
    ))
    .load::<Session>(conn)
    .unwrap()
    .into_iter()
    .map(|session| session.pid)
    .collect()
}

fn session(conn: &mut PgConnection, role: &str) -> i32 {
    eventually(SOON, role, || sessions(conn, role).first().copied())
}

#[test]
fn a_frozen_session_of_the_claimer_is_left_behind_and_replaced() {
    let server = Server::start();
    let db = TestDb::on(&server);
    let running = quiet(db.url(), idempotent("a", |_| Dispatched::completed()))
        .start()
        .unwrap();
    let mut conn = db.connect();
    let frozen = session(&mut conn, "claimer");
    server.sigstop_session(frozen);
    let id = enqueued(&db, 1)[0];
    let since = Instant::now();
    until_status(&mut conn, id, OutboxStatus::Completed);
    assert!(
        since.elapsed() >= DEADLINE - ms(500),
        "the fault did not fire"
    );
    assert!(since.elapsed() < stretched(DEADLINE + 2 * SECOND));
    assert_eq!(running.stats().abandoned_sessions, 1);
    assert_eq!(running.stats().begun, 1);

    server.sigcont_session(frozen);
    eventually(SOON, "a thread that comes back", || {
        (running.stats().abandoned_sessions == 0).then_some(())
    });
    assert_eq!(sessions(&mut conn, "claimer").len(), 1);
}

#[test]
fn a_frozen_session_of_the_settler_delays_a_settlement_by_its_deadline() {
    let server = Server::start();
    let db = TestDb::on(&server);
    let (send, arrivals, answer) = gated();
    let running = quiet(db.url(), idempotent("a", send)).start().unwrap();
    let ids = enqueued(&db, 2);
    let mut conn = db.connect();
    arrivals.recv_timeout(SOON).unwrap();
    answer.send(Dispatched::completed()).unwrap();
    // One of the two is settled, so there is a session.
    let frozen = session(&mut conn, "settler");
    eventually(SOON, "one completed", || {
        (with_status(&mut conn, "completed") == 1).then_some(())
    });
    server.sigstop_session(frozen);
    answer.send(Dispatched::completed()).unwrap();
    for id in ids {
        until_status(&mut conn, id, OutboxStatus::Completed);
    }
    assert_eq!(running.stats().abandoned_sessions, 1);
    assert_eq!((running.stats().begun, running.stats().lost_claims), (2, 0));
    server.sigcont_session(frozen);
}

/// Waits until the dispatcher sleeps, so that the next COMMIT is a claim's.
fn until_quiet(proxy: &Proxy) {
    eventually(SOON, "a dispatcher that asks nothing", || {
        let before = proxy.statements();
        std::thread::sleep(ms(400));
        (before > 0 && proxy.statements() - before <= 1).then_some(())
    });
}

/// The claim is committed and the answer lost: nobody has the row in hand.
fn an_orphan_is_handed_back(fault: impl FnOnce(&Proxy), sessions_left: u64) {
    let server = Server::start();
    let db = TestDb::on(&server);
    let proxy = Proxy::to(server.port());
    let (begun, begins) = unbounded();
    let send = move |entry: &OutboxEntry| {
        let _ = begun.send(i_of(entry));
        Dispatched::completed()
    };
    let running = quiet(&proxy.url(db.url()), idempotent("a", send))
        .start()
        .unwrap();
    let mut conn = db.connect();
    until_quiet(&proxy);
    fault(&proxy);
    let ids = enqueued(&db, 3);
    let mut seen: Vec<u64> = (0..3)
        .map(|_| begins.recv_timeout(stretched(SOON)).unwrap())
        .collect();
    seen.sort_unstable();
    assert_eq!(seen, [1, 2, 3]);
    for id in ids {
        // The attempt of the lost claim is given back.
        let record = until_status(&mut conn, id, OutboxStatus::Completed);
        assert_eq!((record.entry.attempt_count, record.lapse_count), (1, 0));
    }
    assert!(proxy.fired() > 0, "the fault did not fire");
    let stats = running.stats();
    assert_eq!((stats.orphans, stats.begun, stats.lapsed), (3, 3, 0));
    assert_eq!(stats.abandoned_sessions, sessions_left);
    proxy.cut();
    eventually(SOON, "threads that come back", || {
        (running.stats().abandoned_sessions == 0).then_some(())
    });
}

#[test]
fn a_claim_whose_commit_was_cut_is_found_and_handed_back() {
    an_orphan_is_handed_back(|proxy| proxy.cut_answer_to("COMMIT\0"), 0);
}

#[test]
fn a_claim_whose_commit_was_never_answered_is_found_and_handed_back() {
    an_orphan_is_handed_back(|proxy| proxy.silence_answer_to("COMMIT\0"), 1);
}

/// What the check for orphans must never touch: a call that runs, and an answer
/// that could not be written.
#[test]
fn rows_in_hand_are_no_orphans() {
    let server = Server::start();
    let db = TestDb::on(&server);
    let proxy = Proxy::to(server.port());
    let (send, arrivals, answer) = gated();
    let running = quiet(
        &proxy.url(db.url()),
        idempotent("a", send).with_concurrency(2),
    )
    .start()
    .unwrap();
    let first = enqueued(&db, 1)[0];
    arrivals.recv_timeout(SOON).unwrap();
    until_quiet(&proxy);
    // Another claim is lost while this call runs.
    proxy.cut_answer_to("COMMIT\0");
    let second = OutboxEntry::new("a", "k2", &json!({ "i": 2 })).unwrap();
    enqueue(&mut db.connect(), &second).unwrap();
    assert_eq!(arrivals.recv_timeout(SOON), Ok(2));
    assert_eq!(running.stats().orphans, 1);
    assert!(arrivals.try_recv().is_err());
    for _ in 0..2 {
        answer.send(Dispatched::completed()).unwrap();
    }
    let mut conn = db.connect();
    for id in [first, second.outbox_id] {
        let record = until_status(&mut conn, id, OutboxStatus::Completed);
        assert_eq!(record.entry.attempt_count, 1);
    }
    assert_eq!(running.stats().begun, 2);
}

/// Its call was made, so it is an unknown outcome and no orphan.
#[test]
fn a_row_whose_answer_could_not_be_written_is_not_handed_back() {
    let server = Server::start();
    let db = TestDb::on(&server);
    let proxy = Proxy::to(server.port());
    // Nor does it lapse, so that the look for orphans sees it.
    db.execute(
        "CREATE FUNCTION skip() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
         CREATE TRIGGER skip BEFORE UPDATE ON tf_outbox FOR EACH ROW
             WHEN (NEW.status = 'outcome_unknown') EXECUTE FUNCTION skip()",
    );
    let (send, arrivals, answer) = gated();
    let running = Dispatcher::builder(&proxy.url(db.url()))
        .destination(Destination::manual("a", send))
        .with_lease(SECOND)
        .with_maintenance_interval(Duration::from_secs(600))
        .start()
        .unwrap();
    let first = enqueued(&db, 1)[0];
    arrivals.recv_timeout(SOON).unwrap();
    proxy.refuse();
    answer.send(Dispatched::completed()).unwrap();
    eventually(SOON, "an answer that is given up", || {
        (running.stats().lost_claims == 1).then_some(())
    });
    proxy.heal();
    // The claimer has looked for orphans before it claims again.
    let second = OutboxEntry::new("a", "k2", &json!({ "i": 2 })).unwrap();
    let mut conn = db.connect();
    enqueue(&mut conn, &second).unwrap();
    assert_eq!(arrivals.recv_timeout(SOON), Ok(2));
    answer.send(Dispatched::completed()).unwrap();
    until_status(&mut conn, second.outbox_id, OutboxStatus::Completed);
    let record = get(&mut conn, first).unwrap();
    assert_eq!(record.entry.status, OutboxStatus::Dispatching);
    assert_eq!(running.stats().orphans, 0);
    assert!(arrivals.try_recv().is_err());
}

#[test]
fn a_frozen_server_holds_up_no_stop_and_what_is_left_is_named() {
    let server = Server::start();
    let db = TestDb::on(&server);
    let (send, arrivals, answer) = gated();
    let running = quiet(db.url(), idempotent("a", send)).start().unwrap();
    let id = enqueued(&db, 1)[0];
    arrivals.recv_timeout(SOON).unwrap();
    server.sigstop();
    answer.send(Dispatched::completed()).unwrap();
    let asked = Instant::now();
    let report = running.stop(2 * SECOND);
    let took = asked.elapsed();
    server.sigcont();
    assert!(took >= SECOND && took <= stretched(DEADLINE), "{took:?}");
    assert_eq!((report.finished, report.unsettled), (0, 1));
    assert!(report.left_running > 0, "{report:?}");
    // Nobody knows whether the server took it after all, and nobody claims to.
    let record = get(&mut db.connect(), id).unwrap();
    let taken = [OutboxStatus::Dispatching, OutboxStatus::Completed];
    assert!(taken.contains(&record.entry.status));
    assert_eq!(record.entry.attempt_count, 1);
}

#[test]
fn a_frozen_server_that_goes_on_is_gone_on_with() {
    let server = Server::start();
    let db = TestDb::on(&server);
    let running = quiet(db.url(), idempotent("a", |_| Dispatched::completed()))
        .start()
        .unwrap();
    enqueued(&db, 1);
    let mut conn = db.connect();
    eventually(SOON, "one completed", || {
        (with_status(&mut conn, "completed") == 1).then_some(())
    });
    let entry = OutboxEntry::new("a", "k2", &json!({ "i": 2 })).unwrap();
    enqueue(&mut conn, &entry).unwrap();
    server.sigstop();
    std::thread::sleep(4 * SECOND);
    server.sigcont();
    until_status(&mut conn, entry.outbox_id, OutboxStatus::Completed);
    eventually(3 * SOON, "all threads back", || {
        (running.stats().abandoned_sessions == 0).then_some(())
    });
    assert!(running.stop(SOON).blocked.is_empty());
}

#[test]
fn packets_that_are_swallowed_cost_a_deadline_and_few_threads() {
    let server = Server::start();
    let db = TestDb::on(&server);
    let proxy = Proxy::to(server.port());
    let (send, arrivals, answer) = gated();
    let running = Dispatcher::builder(&proxy.url(db.url()))
        .destination(idempotent("a", send).with_concurrency(4))
        .with_lease(3 * DEADLINE)
        .with_maintenance_interval(ms(200))
        .start()
        .unwrap();
    let ids = enqueued(&db, 2);
    for _ in 0..2 {
        arrivals.recv_timeout(SOON).unwrap();
    }
    proxy.blackhole();
    for _ in 0..2 {
        answer.send(Dispatched::completed()).unwrap();
    }
    eventually(SOON, "sessions that are left behind", || {
        (running.stats().abandoned_sessions >= 2).then_some(())
    });
    assert!(proxy.fired() > 0);
    proxy.heal();
    let mut conn = db.connect();
    for id in ids {
        until_status(&mut conn, id, OutboxStatus::Completed);
    }
    assert!(running.stats().abandoned_sessions <= 16);
    proxy.cut();
    eventually(SOON, "threads that come back", || {
        (running.stats().abandoned_sessions == 0).then_some(())
    });
    assert_eq!(running.stats().begun, 2);
}

#[test]
fn a_frozen_listener_is_polled_around_and_replaced() {
    let server = Server::start();
    let db = TestDb::on(&server);
    let (begun, begins) = unbounded();
    let send = move |entry: &OutboxEntry| {
        let _ = begun.send(i_of(entry));
        Dispatched::completed()
    };
    let running = quiet(db.url(), idempotent("a", send))
        .with_poll(Duration::from_secs(600))
        .start()
        .unwrap();
    let mut conn = db.connect();
    let frozen = session(&mut conn, "listener");
    server.sigstop_session(frozen);
    // It is asked something every ten seconds, and then it is silent.
    eventually(3 * SOON, "a listener that is left behind", || {
        (running.stats().abandoned_sessions == 1).then_some(())
    });
    enqueued(&db, 1);
    assert_eq!(
        begins.recv_timeout(stretched(Duration::from_secs(5))),
        Ok(1)
    );
    eventually(SOON, "a second listener", || {
        (sessions(&mut conn, "listener").len() == 2).then_some(())
    });
    server.sigcont_session(frozen);
    eventually(SOON, "the first to be gone", || {
        (running.stats().abandoned_sessions == 0 && sessions(&mut conn, "listener").len() == 1)
            .then_some(())
    });
    let entry = OutboxEntry::new("a", "k2", &json!({ "i": 2 })).unwrap();
    enqueue(&mut conn, &entry).unwrap();
    assert_eq!(begins.recv_timeout(stretched(SECOND * 2)), Ok(2));
}

#[test]
fn at_its_cap_of_hanging_threads_a_destination_says_so_and_goes_on_when_they_return() {
    let db = TestDb::new();
    let (send, arrivals, answer) = gated();
    let hanging = idempotent("a", send)
        .with_send_timeout(ms(100))
        .with_concurrency(2)
        .with_max_abandoned(3)
        .with_prefetch(0);
    let running = Dispatcher::builder(db.url())
        .destination(hanging)
        .with_maintenance_interval(Duration::from_secs(600))
        .start()
        .unwrap();
    enqueue_all(&mut db.connect(), &rows(20)).unwrap();
    eventually(SOON, "a destination that pauses", || {
        (running.destinations()[0].paused == Some(Pause::ThreadsHang)).then_some(())
    });
    let mut conn = db.connect();
    eventually(SOON, "nothing in hand", || {
        (running.destinations()[0].in_hand == 0).then_some(())
    });
    // The cap may be passed by what was claimed before it was reached, no further.
    let hang = running.destinations()[0].abandoned;
    assert!((3..=4).contains(&hang), "{hang}");
    assert_eq!(arrivals.len(), hang);
    assert_eq!(with_status(&mut conn, "pending"), 20 - hang as i64);
    assert_eq!(running.stats().abandoned as usize, hang);

    for _ in 0..20 {
        answer.send(Dispatched::completed()).unwrap();
    }
    eventually(SOON, "all completed", || {
        (with_status(&mut conn, "completed") == 20).then_some(())
    });
    assert_eq!(running.destinations()[0].paused, None);
    assert_eq!(running.stats().late_answers as usize, hang);
}
