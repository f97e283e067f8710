//! Several dispatchers on one table, unlike one another, coming and going.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use chrono::{TimeDelta, Utc};
use crossbeam_channel::unbounded;
use diesel::prelude::*;
use diesel_outbox::schema::tf_outbox;
use diesel_outbox::{
    Dispatched, Dispatcher, OutboxEntry, OutboxId, OutboxStatus, claim_due, enqueue, enqueue_all,
    get,
};
use serde_json::json;
use support::db::TestDb;
use support::dispatch::{
    SOON, dispatcher, enqueued, gated, i_of, idempotent, ms, rows, until_status, whole_row,
    with_status,
};
use support::process::{Child, role, say};
use support::wait::eventually;

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

#[test]
fn ten_dispatchers_send_each_row_once() {
    let db = TestDb::new();
    let sent: Arc<Mutex<HashMap<OutboxId, usize>>> = Arc::default();
    let ids = enqueued(&db, 5_000);
    let running: Vec<_> = (0..10)
        .map(|_| {
            let sent = Arc::clone(&sent);
            let send = move |entry: &OutboxEntry| {
                *sent.lock().unwrap().entry(entry.outbox_id).or_default() += 1;
                Dispatched::completed()
            };
            dispatcher(&db, idempotent("a", send))
                .with_batch(50)
                .start()
                .unwrap()
        })
        .collect();
    let mut conn = db.connect();
    eventually(Duration::from_secs(60), "all completed", || {
        (with_status(&mut conn, "completed") == 5_000).then_some(())
    });
    let sent = sent.lock().unwrap();
    assert_eq!(sent.len(), ids.len());
    assert!(sent.values().all(|n| *n == 1));
    assert!(running.iter().filter(|d| d.stats().claimed > 0).count() > 1);
}

// L3, L4
#[test]
fn old_foreign_claims_lapse_and_live_ones_are_left_alone() {
    let db = TestDb::new();
    let mut conn = db.connect();
    let old = enqueued(&db, 5_000);
    claim_due(&mut conn, Utc::now(), 5_000, "gone").unwrap();
    diesel::update(tf_outbox::table)
        .set(tf_outbox::claim_taken_at.eq(Utc::now() - TimeDelta::days(1)))
        .execute(&mut conn)
        .unwrap();
    let live = OutboxEntry::new("a", "live", &json!({ "i": 0 })).unwrap();
    enqueue(&mut conn, &live).unwrap();
    claim_due(&mut conn, Utc::now(), 1, "alive").unwrap();
    let before = whole_row(&mut conn, live.outbox_id);
    let running = dispatcher(&db, idempotent("a", |_| Dispatched::completed()))
        .with_maintenance_interval(Duration::from_secs(1))
        .start()
        .unwrap();
    eventually(Duration::from_secs(30), "all lapsed", || {
        (running.stats().lapsed == 5_000).then_some(())
    });
    eventually(Duration::from_secs(60), "all completed", || {
        (with_status(&mut conn, "completed") == old.len() as i64).then_some(())
    });
    let stats = running.stats();
    assert_eq!((stats.lapsed, stats.resent), (5_000, 5_000));
    assert_eq!(whole_row(&mut conn, live.outbox_id), before);
}

/// Each of the two has a call that is longer than the shorter lease, and looks for
/// lapsed claims all the time.
#[test]
fn a_long_lease_and_a_short_one_lapse_no_live_claim_of_the_other() {
    let db = TestDb::new();
    let start = |lease: Duration| {
        let (begun, begins) = unbounded();
        let send = move |entry: &OutboxEntry| {
            let _ = begun.send(i_of(entry));
            std::thread::sleep(4 * SECOND);
            Dispatched::completed()
        };
        let destination = idempotent("a", send).with_concurrency(5).with_prefetch(0);
        let running = dispatcher(&db, destination)
            .with_lease(lease)
            .with_maintenance_interval(ms(50))
            .start()
            .unwrap();
        (running, begins)
    };
    let both = [start(SECOND), start(MINUTE)];
    let ids = enqueued(&db, 10);
    let mut conn = db.connect();
    for id in ids {
        let record = until_status(&mut conn, id, OutboxStatus::Completed);
        assert_eq!((record.entry.attempt_count, record.lapse_count), (1, 0));
    }
    for (running, begins) in both {
        assert_eq!(
            (running.stats().lapsed, running.stats().lost_claims),
            (0, 0)
        );
        assert_eq!(begins.len(), 5, "both had a part in it");
    }
}

/// A dispatcher in a process of its own, until SIGTERM. It says `begun <key>` for
/// each call and `ended <left unknown> <unsettled>`.
#[test]
fn dispatching() {
    role("dispatching", || {
        let send = |entry: &OutboxEntry| {
            say(&format!("begun {}", entry.idempotency_key));
            std::thread::sleep(ms(20));
            Dispatched::completed()
        };
        let running = Dispatcher::builder(&std::env::var("OUTBOX").unwrap())
            .destination(idempotent("a", send))
            .start()
            .unwrap();
        let mut signals =
            signal_hook::iterator::Signals::new([signal_hook::consts::SIGTERM]).unwrap();
        say("up");
        signals.forever().next();
        let report = running.stop(SOON);
        say(&format!(
            "ended {} {}",
            report.left_unknown, report.unsettled
        ));
    });
}

#[test]
fn a_rolling_restart_of_four_under_load_loses_and_doubles_nothing() {
    const ROWS: usize = 3_000;
    let db = TestDb::new();
    let start = || {
        let child = Child::spawn("dispatching", &[("OUTBOX", db.url())]);
        child.wait_line("up", SOON);
        child
    };
    let mut calls: HashMap<String, usize> = HashMap::new();
    let mut end = |mut child: Child| {
        child.sigterm();
        loop {
            let line = child.wait_line("", SOON);
            if let Some(key) = line.strip_prefix("begun ") {
                *calls.entry(key.to_owned()).or_default() += 1;
            } else if let Some(report) = line.strip_prefix("ended ") {
                assert_eq!(report, "0 0");
                break;
            }
        }
        assert!(child.wait_exit(SOON).success());
    };
    let mut four: Vec<Child> = (0..4).map(|_| start()).collect();
    let entries = rows(ROWS);
    let mut conn = db.connect();
    std::thread::scope(|scope| {
        let entries = &entries;
        let url = db.url();
        let load = scope.spawn(move || {
            let mut conn = PgConnection::establish(url).unwrap();
            for few in entries.chunks(20) {
                enqueue_all(&mut conn, few).unwrap();
                std::thread::sleep(ms(20));
            }
        });
        for old in &mut four {
            // There is work while each of them goes.
            eventually(SOON, "rows that are under way", || {
                (with_status(&mut conn, "dispatching") > 0).then_some(())
            });
            let next = start();
            end(std::mem::replace(old, next));
        }
        load.join().unwrap();
    });
    eventually(MINUTE, "all completed", || {
        (with_status(&mut conn, "completed") == ROWS as i64).then_some(())
    });
    four.into_iter().for_each(&mut end);
    assert_eq!(calls.len(), ROWS);
    assert!(calls.values().all(|n| *n == 1));
}

/// The public claim is foreign to every dispatcher, as the other implementation's
/// is.
#[test]
fn a_foreign_claim_is_left_alone_for_its_lease_and_settled_by_its_holder() {
    let db = TestDb::new();
    let ids = enqueued(&db, 1);
    let mut conn = db.connect();
    assert_eq!(
        claim_due(&mut conn, Utc::now(), 1, "theirs").unwrap().len(),
        1
    );
    let (send, arrivals, _answer) = gated();
    let running = dispatcher(&db, idempotent("a", send))
        .with_lease(ms(100))
        .with_maintenance_interval(ms(20))
        .with_foreign_lease(MINUTE)
        .start()
        .unwrap();
    assert!(arrivals.recv_timeout(2 * SECOND).is_err());
    let record = get(&mut conn, ids[0]).unwrap();
    assert_eq!(record.claim.unwrap().worker_id, "theirs");
    diesel_outbox::mark_completed(&mut conn, ids[0]).unwrap();
    let other = OutboxEntry::new("a", "k2", &json!({ "i": 2 })).unwrap();
    enqueue(&mut conn, &other).unwrap();
    assert_eq!(arrivals.recv_timeout(SOON), Ok(2));
    assert_eq!(running.stats().lapsed, 0);
}
