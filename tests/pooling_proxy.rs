//! Through a real PgBouncer in transaction mode: each transaction may meet another
//! server connection, and others share them.
//!
//! Where no PgBouncer can be had these tests say so, and pass.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use diesel::prelude::*;
use diesel_outbox::{
    Backoff, Destination, Dispatched, Dispatcher, OutboxEntry, OutboxRecord, Reconciled, Route,
    enqueue_all,
};
use serde_json::json;
use support::catalog::strings;
use support::db::TestDb;
use support::dispatch::{SOON, enqueued, gated, i_of, idempotent, ms, with_status};
use support::logs::Logs;
use support::pgbouncer::PgBouncer;
use support::server::Server;
use support::wait::eventually;

/// A server, a database on it, and a pooler with so many connections.
macro_rules! pooled {
    ($connections:expr) => {{
        let server = Server::start();
        let Some(pooler) = PgBouncer::before(&server, $connections) else {
            return;
        };
        let db = TestDb::on(&server);
        (pooler, db, server)
    }};
}

#[test]
fn every_kind_of_row_is_worked_off_through_a_transaction_pooler() {
    let (pooler, db, _server) = pooled!(2);
    let calls: Arc<Mutex<HashMap<u64, usize>>> = Arc::default();
    let counted = Arc::clone(&calls);
    let send = move |entry: &OutboxEntry| {
        *counted.lock().unwrap().entry(i_of(entry)).or_default() += 1;
        match (i_of(entry) % 10, entry.attempt_count) {
            (3, 1) => Dispatched::retryable("x"),
            (4, 1) => Dispatched::unknown(),
            (5, _) => Dispatched::permanent("x"),
            _ => Dispatched::completed(),
        }
    };
    let reconcile = |_: &OutboxRecord| Reconciled::Completed;
    let backoff = Backoff::exponential(ms(20), ms(20));
    let destination = Destination::reconciled("a", send, reconcile)
        .with_settle_delay(Duration::ZERO)
        .with_backoff(backoff);
    let start = || {
        Dispatcher::builder(&pooler.url(db.name()))
            .with_route(Route::TransactionPooler)
            .destination(destination.clone())
            .with_poll(ms(50))
            .with_maintenance_interval(ms(50))
            .start()
            .unwrap()
    };
    let running = [start(), start()];
    let rows: Vec<OutboxEntry> = (0..500)
        .map(|i| {
            let entry = OutboxEntry::new("a", format!("k{i}"), &json!({ "i": i })).unwrap();
            match i % 3 {
                0 => entry.ordering_key(format!("o{}", i % 21)),
                _ => entry,
            }
        })
        .collect();
    let mut conn = db.connect();
    enqueue_all(&mut conn, &rows).unwrap();
    eventually(3 * SOON, "an end of all rows", || {
        let ends = with_status(&mut conn, "completed") + with_status(&mut conn, "failed");
        (ends == 500).then_some(())
    });
    assert_eq!(with_status(&mut conn, "failed"), 50);
    let calls = calls.lock().unwrap();
    for (i, n) in calls.iter() {
        assert_eq!(*n, if i % 10 == 3 { 2 } else { 1 }, "row {i}");
    }
    assert_eq!(calls.len(), 500);
    for dispatcher in running {
        assert!(dispatcher.stop(SOON).blocked.is_empty());
    }
}

#[test]
fn nothing_of_ours_leaks_to_the_poolers_other_clients() {
    // All clients meet the one connection.
    let (pooler, db, _server) = pooled!(1);
    let mut other = PgConnection::establish(&pooler.url(db.name())).unwrap();
    other.set_prepared_statement_cache_size(diesel::connection::CacheSize::Disabled);
    let session = "SELECT concat_ws(' ', current_setting('statement_timeout'),
                          current_setting('lock_timeout'),
                          current_setting('idle_in_transaction_session_timeout'),
                          current_setting('default_transaction_isolation'),
                          (SELECT count(*) FROM pg_prepared_statements WHERE from_sql OR name <> ''),
                          (SELECT count(*) FROM pg_listening_channels()),
                          (SELECT count(*) FROM pg_locks
                            WHERE locktype = 'advisory' AND pid = pg_backend_pid())) AS line";
    let pid = "SELECT pg_backend_pid()::text AS line";
    let (before, its) = (strings(&mut other, session), strings(&mut other, pid));
    assert_eq!(before, ["0 0 0 read committed 0 0 0"]);
    let running = Dispatcher::builder(&pooler.url(db.name()))
        .with_route(Route::TransactionPooler)
        .destination(idempotent("a", |_| Dispatched::completed()))
        .with_poll(ms(20))
        .with_maintenance_interval(ms(20))
        .start()
        .unwrap();
    let ids = enqueued(&db, 20);
    let mut seen = 0;
    let mut conn = db.connect();
    eventually(SOON, "all completed", || {
        assert_eq!(strings(&mut other, session), before);
        seen += 1;
        (with_status(&mut conn, "completed") == ids.len() as i64).then_some(())
    });
    assert!(seen > 1);
    running.stop(SOON);
    assert_eq!(
        strings(&mut other, pid),
        its,
        "another connection was looked at"
    );
    assert_eq!(strings(&mut other, session), before);
}

#[test]
fn a_dispatcher_stops_and_hands_back_through_a_pooler() {
    let (pooler, db, _server) = pooled!(1);
    let (send, arrivals, answer) = gated();
    let running = Dispatcher::builder(&pooler.url(db.name()))
        .with_route(Route::TransactionPooler)
        .destination(idempotent("a", send).with_concurrency(1).with_prefetch(4))
        .with_poll(ms(20))
        .start()
        .unwrap();
    enqueued(&db, 5);
    let first = arrivals.recv_timeout(SOON).unwrap();
    assert_eq!(first, 1);
    let mut conn = db.connect();
    eventually(SOON, "all claimed", || {
        (with_status(&mut conn, "dispatching") == 5).then_some(())
    });
    answer.send(Dispatched::completed()).unwrap();
    arrivals.recv_timeout(SOON).unwrap();
    answer.send(Dispatched::completed()).unwrap();
    let report = std::thread::scope(|scope| {
        let stopping = scope.spawn(|| running.stop(SOON));
        drop(answer);
        stopping.join().unwrap()
    });
    assert!(
        report.blocked.is_empty() && report.unsettled == 0,
        "{report:?}"
    );
    assert_eq!(with_status(&mut conn, "dispatching"), 0);
}

#[test]
fn a_dispatcher_that_was_not_told_notices_that_nothing_is_heard_and_says_so_once() {
    let logs = Logs::capture();
    let (pooler, db, _server) = pooled!(1);
    let running = Dispatcher::builder(&pooler.url(db.name()))
        .destination(idempotent("a", |_| Dispatched::completed()))
        .start()
        .unwrap();
    let unheard = |logs: &Logs| {
        let lines = logs.our_warnings();
        let of_it = lines
            .iter()
            .filter(|line| line.text.contains("notifications do not reach"));
        of_it.count()
    };
    eventually(SOON, "a word about it", || {
        (unheard(&logs) > 0).then_some(())
    });
    std::thread::sleep(Duration::from_secs(4));
    assert_eq!(unheard(&logs), 1);
    running.stop(SOON);
    // Nor is anybody left listening on a connection that others use.
    let mut other = PgConnection::establish(&pooler.url(db.name())).unwrap();
    other.set_prepared_statement_cache_size(diesel::connection::CacheSize::Disabled);
    let listening = "SELECT c AS line FROM pg_listening_channels() c";
    assert_eq!(strings(&mut other, listening), Vec::<String>::new());
}
