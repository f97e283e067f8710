//! One destination's trouble is nobody else's: rates, breakers, hanging threads.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crossbeam_channel::unbounded;
use diesel::prelude::*;
use diesel_outbox::schema::tf_outbox;
use diesel_outbox::{
    Backoff, Destination, Dispatched, Dispatcher, OutboxEntry, OutboxStatus, Pause, enqueue,
    enqueue_all, get,
};
use serde_json::json;
use support::db::TestDb;
use support::dispatch::{
    SOON, dispatcher, enqueued, gated, i_of, idempotent, ms, until_status, with_status,
};
use support::proxy::{Proxy, port_of};
use support::wait::{eventually, stretched};

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn a_destination_that_hangs_leaves_nine_others_flowing() {
    let db = TestDb::new();
    let (send, arrivals, _never) = gated();
    let mut builder =
        Dispatcher::builder(db.url()).destination(Destination::idempotent("d0", send));
    let (begun, begins) = unbounded();
    for i in 1..10 {
        let begun = begun.clone();
        builder = builder.destination(idempotent(&format!("d{i}"), move |entry| {
            let _ = begun.send(i_of(entry));
            Dispatched::completed()
        }));
    }
    let mut conn = db.connect();
    let rows = |d: usize, n: u64| -> Vec<OutboxEntry> {
        (0..n)
            .map(|i| {
                OutboxEntry::new(format!("d{d}"), format!("k{i}"), &json!({ "i": i })).unwrap()
            })
            .collect()
    };
    enqueue_all(&mut conn, &rows(0, 100)).unwrap();
    let running = builder.start().unwrap();
    // All its threads hang before the others have anything to do.
    for _ in 0..8 {
        arrivals.recv_timeout(SOON).unwrap();
    }
    for d in 1..10 {
        enqueue_all(&mut conn, &rows(d, 100)).unwrap();
    }
    for _ in 0..900 {
        begins
            .recv_timeout(stretched(Duration::from_secs(5)))
            .unwrap();
    }
    eventually(SOON, "all others completed", || {
        (with_status(&mut conn, "completed") == 900).then_some(())
    });
    assert_eq!(arrivals.len(), 0);
    let hanging = &running.destinations()[0];
    assert_eq!((hanging.name.as_str(), hanging.in_hand), ("d0", 8));
    drop(_never);
    running.stop(SECOND);
}

#[test]
fn a_hundred_destinations_cost_neither_threads_nor_statements() {
    let db = TestDb::new();
    let proxy = Proxy::to(port_of(db.url()));
    let (begun, begins) = unbounded();
    let mut builder = Dispatcher::builder(&proxy.url(db.url())).with_poll(Duration::from_secs(60));
    for d in 0..100 {
        let begun = begun.clone();
        builder = builder.destination(idempotent(&format!("d{d}"), move |entry| {
            let _ = begun.send(i_of(entry));
            Dispatched::completed()
        }));
    }
    let running = builder.start().unwrap();
    let mut conn = db.connect();
    let quiet = || {
        eventually(SOON, "a dispatcher that asks little", || {
            let before = proxy.statements();
            std::thread::sleep(ms(300));
            (proxy.statements() - before < 5).then_some(())
        });
    };
    quiet();
    let workers = |running: &diesel_outbox::DispatcherHandle| -> usize {
        running.destinations().iter().map(|d| d.workers).sum()
    };
    assert_eq!(workers(&running), 0);
    // A look is a statement, a claim a transaction of two and its settlement one
    // of three.
    let before = proxy.statements();
    enqueue(
        &mut conn,
        &OutboxEntry::new("d77", "k", &json!({ "i": 77 })).unwrap(),
    )
    .unwrap();
    assert_eq!(begins.recv_timeout(SOON), Ok(77));
    quiet();
    let asked = proxy.statements() - before;
    assert!((1..60).contains(&asked), "{asked} statements");
    assert_eq!(workers(&running), 1);
}

#[test]
fn a_rate_is_kept_and_nothing_is_claimed_ahead_of_it() {
    let db = TestDb::new();
    let begins: Arc<Mutex<Vec<Instant>>> = Arc::default();
    let seen = Arc::clone(&begins);
    let limited = idempotent("a", move |_| {
        seen.lock().unwrap().push(Instant::now());
        Dispatched::completed()
    })
    .with_rate(10, SECOND)
    .with_prefetch(100);
    enqueued(&db, 40);
    let started = Instant::now();
    let running = dispatcher(&db, limited).start().unwrap();
    let mut conn = db.connect();
    eventually(SOON, "the first ten", || {
        (with_status(&mut conn, "completed") >= 10).then_some(())
    });
    let untouched: i64 = tf_outbox::table
        .filter(tf_outbox::status.eq("pending"))
        .filter(tf_outbox::attempt_count.eq(0))
        .count()
        .get_result(&mut conn)
        .unwrap();
    assert!(untouched >= 15, "{untouched} rows wait unclaimed");
    eventually(SOON, "all completed", || {
        (with_status(&mut conn, "completed") == 40).then_some(())
    });
    assert!(
        started.elapsed() >= Duration::from_millis(2_900),
        "{:?}",
        started.elapsed()
    );
    // No window has more than a full bucket and what it gained meanwhile.
    let begins = begins.lock().unwrap();
    for (i, first) in begins.iter().enumerate() {
        for (j, last) in begins.iter().enumerate().skip(i) {
            let most = 10.0 + 10.0 * (*last - *first).as_secs_f64() + 1.0;
            assert!(
                (j - i + 1) as f64 <= most,
                "{} in {:?}",
                j - i + 1,
                *last - *first
            );
        }
    }
    let stats = running.stats();
    assert_eq!((stats.claimed, stats.begun, stats.handed_back), (40, 40, 0));
}

#[test]
fn a_sweep_waits_for_the_tokens_that_it_needs_and_for_no_more() {
    let db = TestDb::new();
    enqueued(&db, 7);
    let limited = idempotent("a", |_| Dispatched::completed()).with_rate(5, SECOND);
    let rare = idempotent("b", |_| Dispatched::completed()).with_rate(1, Duration::from_secs(3600));
    let only = OutboxEntry::new("b", "k", &json!({})).unwrap();
    enqueue(&mut db.connect(), &only).unwrap();
    let begun = Instant::now();
    let mut dispatcher = dispatcher(&db, limited).destination(rare).build().unwrap();
    assert_eq!(dispatcher.run_once().unwrap().completed, 8);
    assert!(begun.elapsed() >= ms(380), "{:?}", begun.elapsed());
    assert!(begun.elapsed() < stretched(SOON));
}

/// A remote that is down until it is told otherwise.
struct Down {
    up: Arc<AtomicBool>,
    begins: crossbeam_channel::Receiver<u64>,
}

fn down(destination: &str) -> (Destination, Down) {
    let up = Arc::new(AtomicBool::new(false));
    let (begun, begins) = unbounded();
    let is_up = Arc::clone(&up);
    let send = move |entry: &OutboxEntry| {
        let _ = begun.send(i_of(entry));
        match is_up.load(Ordering::SeqCst) {
            true => Dispatched::completed(),
            false => Dispatched::retryable("x.down"),
        }
    };
    let destination = Destination::idempotent(destination, send)
        .with_concurrency(1)
        .with_backoff(Backoff::exponential(ms(50), SECOND).with_jitter(0.0))
        .with_breaker(3, ms(1_500));
    (destination, Down { up, begins })
}

#[test]
fn an_open_breaker_claims_nothing_and_lets_one_call_through() {
    let db = TestDb::new();
    let (destination, remote) = down("a");
    enqueued(&db, 20);
    let running = dispatcher(&db, destination.with_prefetch(10))
        .start()
        .unwrap();
    let mut conn = db.connect();
    for _ in 0..3 {
        remote.begins.recv_timeout(SOON).unwrap();
    }
    let opened = Instant::now();
    eventually(SOON, "an open breaker", || {
        (running.destinations()[0].paused == Some(Pause::BreakerOpen)).then_some(())
    });
    // What waited for the worker is handed back, and all else untouched.
    eventually(SOON, "nothing in hand", || {
        (running.destinations()[0].in_hand == 0).then_some(())
    });
    assert!(running.stats().handed_back > 0);
    let attempts = |conn: &mut PgConnection| -> i64 {
        tf_outbox::table
            .select(diesel::dsl::sum(tf_outbox::attempt_count))
            .get_result::<Option<i64>>(conn)
            .unwrap()
            .unwrap()
    };
    assert_eq!(attempts(&mut conn), 3);
    assert_eq!(with_status(&mut conn, "pending"), 20);
    assert!(remote.begins.try_recv().is_err());

    // Half-open: one call, which fails.
    remote.begins.recv_timeout(SOON).unwrap();
    assert!(opened.elapsed() >= ms(1_400), "{:?}", opened.elapsed());
    eventually(SOON, "a breaker that opened again", || {
        (running.stats().breaker_opened == 2).then_some(())
    });
    assert!(remote.begins.try_recv().is_err());
    assert_eq!(attempts(&mut conn), 4);

    remote.up.store(true, Ordering::SeqCst);
    eventually(SOON, "all completed", || {
        (with_status(&mut conn, "completed") == 20).then_some(())
    });
    assert_eq!(attempts(&mut conn), 24);
    assert_eq!(running.destinations()[0].paused, None);
}

#[test]
fn a_refusal_of_the_remote_is_an_answer_and_opens_no_breaker() {
    let db = TestDb::new();
    let refusing = idempotent("a", |_| Dispatched::permanent("x.refused")).with_breaker(1, SOON);
    let ids = enqueued(&db, 5);
    let running = dispatcher(&db, refusing).start().unwrap();
    for id in ids {
        until_status(&mut db.connect(), id, OutboxStatus::Failed);
    }
    assert_eq!(running.stats().breaker_opened, 0);
}

#[test]
fn a_panic_and_a_timeout_open_the_breaker_and_others_flow_beside_it() {
    let db = TestDb::new();
    let (send, arrivals, answer) = gated();
    let troubled = Destination::manual("a", move |entry: &OutboxEntry| {
        assert!(i_of(entry) > 1, "the fault of this test");
        send(entry)
    })
    .with_concurrency(1)
    .with_send_timeout(ms(200))
    .with_breaker(2, Duration::from_secs(60));
    let running = dispatcher(&db, troubled)
        .destination(idempotent("b", |_| Dispatched::completed()))
        .start()
        .unwrap();
    let ids = enqueued(&db, 3);
    arrivals.recv_timeout(SOON).unwrap();
    eventually(SOON, "an open breaker", || {
        (running.stats().breaker_opened == 1).then_some(())
    });
    let mut conn = db.connect();
    for id in &ids[..2] {
        until_status(&mut conn, *id, OutboxStatus::OutcomeUnknown);
    }
    let beside = OutboxEntry::new("b", "k", &json!({})).unwrap();
    enqueue(&mut conn, &beside).unwrap();
    until_status(&mut conn, beside.outbox_id, OutboxStatus::Completed);
    let waiting = get(&mut conn, ids[2]).unwrap().entry;
    assert_eq!(
        (waiting.status, waiting.attempt_count),
        (OutboxStatus::Pending, 0)
    );
    assert_eq!((running.stats().panics, running.stats().timeouts), (1, 1));
    answer.send(Dispatched::completed()).unwrap();
}

#[test]
fn a_sweep_leaves_a_destination_alone_whose_breaker_is_open() {
    let db = TestDb::new();
    let (destination, remote) = down("a");
    enqueued(&db, 10);
    let begun = Instant::now();
    let mut dispatcher = dispatcher(&db, destination.with_breaker(3, Duration::from_secs(3600)))
        .build()
        .unwrap();
    let swept = dispatcher.run_once().unwrap();
    assert!(begun.elapsed() < stretched(SOON));
    assert_eq!((swept.begun, swept.breaker_opened), (3, 1));
    assert_eq!(remote.begins.len(), 3);
    assert_eq!(with_status(&mut db.connect(), "pending"), 10);
}
