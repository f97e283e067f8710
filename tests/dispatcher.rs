//! The dispatcher in one process: what becomes of a row, whatever its sender
//! does.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use chrono::{TimeDelta, Utc};
use crossbeam_channel::unbounded;
use diesel::prelude::*;
use diesel_outbox::schema::tf_outbox;
use diesel_outbox::{
    Backoff, Destination, Dispatched, Dispatcher, OutboxEntry, OutboxReader, OutboxStatus,
    PgOutbox, StoreError, code, enqueue, enqueue_all, get,
};
use serde_json::json;
use support::db::TestDb;
use support::dispatch::{
    SOON, dispatcher, enqueued, gated, i_of, idempotent, ms, rows, until_status, whole_row,
    with_status,
};
use support::wait::eventually;

// C8
#[test]
fn the_claim_is_committed_before_the_send() {
    let db = TestDb::new();
    let (seen, found) = unbounded();
    let url = db.url().to_owned();
    let running = dispatcher(
        &db,
        idempotent("a", move |entry| {
            let mut conn = PgConnection::establish(&url).unwrap();
            seen.send(get(&mut conn, entry.outbox_id).unwrap()).unwrap();
            Dispatched::completed()
        }),
    )
    .start()
    .unwrap();
    enqueued(&db, 1);
    let record = found.recv_timeout(SOON).unwrap();
    assert_eq!(record.entry.status, OutboxStatus::Dispatching);
    assert_eq!(record.entry.attempt_count, 1);
    assert_eq!(record.claim.unwrap().worker_id, running.worker_id());
}

// C9
#[test]
fn a_row_that_cannot_be_read_does_not_stop_the_others() {
    let db = TestDb::new();
    let ids = enqueued(&db, 3);
    db.execute(&format!(
        "UPDATE tf_outbox SET next_attempt_at = '-infinity' WHERE outbox_id = '{}'",
        ids[0]
    ));
    let running = dispatcher(&db, idempotent("a", |_| Dispatched::completed()))
        .start()
        .unwrap();
    let mut conn = db.connect();
    for id in &ids[1..] {
        let record = until_status(&mut conn, *id, OutboxStatus::Completed);
        assert_eq!(record.entry.attempt_count, 1);
    }
    let corrupt = StoreError::Corrupt {
        field: Some("next_attempt_at"),
    };
    assert_eq!(get(&mut conn, ids[0]), Err(corrupt));
    let (status, reason): (String, Option<String>) = tf_outbox::table
        .find(ids[0].0)
        .select((tf_outbox::status, tf_outbox::last_failure))
        .get_result(&mut conn)
        .unwrap();
    assert_eq!(
        (status.as_str(), reason.as_deref()),
        ("failed", Some(code::CORRUPT_ROW))
    );
    assert_eq!(running.stats().begun, 2);
}

// N4
#[test]
fn a_row_of_unknown_status_or_destination_is_left_alone() {
    let db = TestDb::new();
    let ids = enqueued(&db, 2);
    let mut conn = db.connect();
    db.execute(&format!(
        "UPDATE tf_outbox SET status = 'weird' WHERE outbox_id = '{}'",
        ids[0]
    ));
    let foreign = OutboxEntry::new("nobody", "k", &()).unwrap();
    enqueue(&mut conn, &foreign).unwrap();
    let both = || [ids[0], foreign.outbox_id].map(|id| whole_row(&mut db.connect(), id));
    let before = both();
    let running = dispatcher(&db, idempotent("a", |_| Dispatched::completed()))
        .start()
        .unwrap();
    until_status(&mut conn, ids[1], OutboxStatus::Completed);
    running.stop(SOON);
    assert_eq!(running.stats().begun, 1);
    assert_eq!(both(), before);
}

// S2, L6
#[test]
fn a_settlement_changes_nothing_once_the_claim_is_over() {
    let db = TestDb::new();
    let (send, arrivals, answer) = gated();
    let running = dispatcher(&db, idempotent("a", send).with_concurrency(2))
        .start()
        .unwrap();
    let ids = enqueued(&db, 2);
    for _ in 0..2 {
        arrivals.recv_timeout(SOON).unwrap();
    }
    let mut conn = db.connect();
    db.execute(&format!(
        "UPDATE tf_outbox SET status = 'failed', completed_at = now(),
                claim_worker_id = NULL, claim_taken_at = NULL WHERE outbox_id = '{}';
         UPDATE tf_outbox SET status = 'pending', next_attempt_at = now() + interval '1 hour',
                claim_worker_id = NULL, claim_taken_at = NULL WHERE outbox_id = '{}'",
        ids[0], ids[1]
    ));
    let before: Vec<_> = ids.iter().map(|id| whole_row(&mut conn, *id)).collect();
    for _ in 0..2 {
        answer.send(Dispatched::completed()).unwrap();
    }
    eventually(SOON, "two lost claims", || {
        (running.stats().lost_claims == 2).then_some(())
    });
    let after: Vec<_> = ids.iter().map(|id| whole_row(&mut conn, *id)).collect();
    assert_eq!(after, before);
}

#[test]
fn an_answer_settles_only_the_claim_that_it_belongs_to() {
    let db = TestDb::new();
    let (arrived, arrivals) = unbounded();
    let (first, first_answer) = unbounded();
    let (second, second_answer) = unbounded();
    let send = move |entry: &OutboxEntry| {
        arrived.send(entry.attempt_count).unwrap();
        let answers = match entry.attempt_count {
            1 => &first_answer,
            _ => &second_answer,
        };
        answers.recv().unwrap_or(Dispatched::unknown())
    };
    let running = dispatcher(&db, idempotent("a", send)).start().unwrap();
    let ids = enqueued(&db, 1);
    assert_eq!(arrivals.recv_timeout(SOON), Ok(1));
    // Released by the other implementation, and claimed by the same dispatcher.
    db.execute(
        "UPDATE tf_outbox SET status = 'pending', claim_worker_id = NULL, claim_taken_at = NULL",
    );
    running.nudge();
    assert_eq!(arrivals.recv_timeout(SOON), Ok(2));
    let mut conn = db.connect();
    let before = get(&mut conn, ids[0]).unwrap();
    first.send(Dispatched::permanent("x.first")).unwrap();
    eventually(SOON, "one lost claim", || {
        (running.stats().lost_claims == 1).then_some(())
    });
    assert_eq!(get(&mut conn, ids[0]).unwrap(), before);
    second.send(Dispatched::completed()).unwrap();
    let record = until_status(&mut conn, ids[0], OutboxStatus::Completed);
    assert_eq!(record.entry.attempt_count, 2);
}

// S9
#[test]
fn a_panicking_sender_stops_nobody_and_leaves_no_trace_of_its_message() {
    let db = TestDb::new();
    let send = |entry: &OutboxEntry| {
        assert!(i_of(entry) != 1 || entry.attempt_count > 1, "4111-SECRET");
        Dispatched::completed()
    };
    let running = dispatcher(&db, idempotent("a", send).with_concurrency(2))
        .start()
        .unwrap();
    let ids = enqueued(&db, 20);
    let mut conn = db.connect();
    for id in &ids {
        until_status(&mut conn, *id, OutboxStatus::Completed);
    }
    let more: Vec<_> = (21..=40)
        .map(|i| OutboxEntry::new("a", format!("k{i}"), &json!({ "i": i })).unwrap())
        .collect();
    enqueue_all(&mut conn, &more).unwrap();
    for entry in &more {
        until_status(&mut conn, entry.outbox_id, OutboxStatus::Completed);
    }
    assert_eq!(running.stats().panics, 1);
    let record = get(&mut conn, ids[0]).unwrap();
    assert_eq!(record.last_failure.as_deref(), Some(code::SENDER_PANICKED));
    assert_eq!(record.entry.attempt_count, 2);
    assert!(!whole_row(&mut conn, ids[0]).contains("SECRET"));
}

// K5
#[test]
fn spent_attempts_fail_the_row_with_the_senders_own_code() {
    let db = TestDb::new();
    let send = |_: &OutboxEntry| Dispatched::retryable("x.down");
    let running = dispatcher(&db, idempotent("a", send).with_max_attempts(3))
        .start()
        .unwrap();
    let ids = enqueued(&db, 1);
    let record = until_status(&mut db.connect(), ids[0], OutboxStatus::Failed);
    assert_eq!(record.entry.attempt_count, 3);
    assert_eq!(record.last_failure.as_deref(), Some("x.down"));
    assert!(record.entry.completed_at.is_some() && record.claim.is_none());
    assert_eq!(running.stats().begun, 3);
}

#[test]
fn a_pending_row_whose_attempts_are_spent_fails_without_a_call() {
    let db = TestDb::new();
    let mut conn = db.connect();
    let mut batch = rows(2);
    batch[0].attempt_count = 3;
    batch[1].attempt_count = i32::MAX as u32;
    enqueue_all(&mut conn, &batch).unwrap();
    let send = |_: &OutboxEntry| Dispatched::completed();
    let running = dispatcher(&db, idempotent("a", send).with_max_attempts(3))
        .start()
        .unwrap();
    for entry in &batch {
        let record = until_status(&mut conn, entry.outbox_id, OutboxStatus::Failed);
        assert_eq!(
            record.last_failure.as_deref(),
            Some(code::ATTEMPTS_EXHAUSTED)
        );
    }
    let first = get(&mut conn, batch[0].outbox_id).unwrap();
    assert_eq!(first.entry.attempt_count, 3);
    assert_eq!(running.stats().begun, 0);
}

// X3
#[test]
fn what_a_sender_says_can_always_be_stored() {
    let db = TestDb::new();
    let card = format!("card 4111111111111111 {}", "x".repeat(10_000));
    let completed = |remote_ref: String| Dispatched::Completed {
        remote_ref: Some(remote_ref),
    };
    let send = move |entry: &OutboxEntry| match i_of(entry) {
        1 => Dispatched::permanent(card.clone()),
        2 => Dispatched::retryable(card.clone()),
        3 => completed("a\0b".into()),
        4 => completed("x".repeat(1_025)),
        _ => Dispatched::Unknown {
            remote_ref: Some("x".repeat(1_024)),
        },
    };
    let slow = Backoff::exponential(Duration::from_secs(60), Duration::from_secs(60));
    let running = dispatcher(
        &db,
        Destination::manual("a", send).with_backoff(slow.with_jitter(0.0)),
    )
    .start()
    .unwrap();
    let ids = enqueued(&db, 5);
    let mut conn = db.connect();
    eventually(SOON, "the retry", || {
        (running.stats().retried == 1).then_some(())
    });
    let expected = [
        (OutboxStatus::Failed, Some(code::INVALID_CODE), 0),
        (OutboxStatus::Pending, Some(code::INVALID_CODE), 0),
        (OutboxStatus::Completed, None, 0),
        (OutboxStatus::Completed, None, 0),
        (OutboxStatus::OutcomeUnknown, None, 1_024),
    ];
    for (id, (status, reason, length)) in ids.iter().zip(expected) {
        let record = until_status(&mut conn, *id, status);
        assert_eq!(record.last_failure.as_deref(), reason);
        assert_eq!(record.remote_ref.map_or(0, |text| text.len()), length);
        assert!(!whole_row(&mut conn, *id).contains("4111"));
    }
}

#[test]
fn a_hanging_sender_is_left_behind_and_its_late_answer_is_used() {
    let db = TestDb::new();
    let (send, arrivals, answer) = gated();
    let hanging = Destination::manual("a", send)
        .with_send_timeout(ms(200))
        .with_concurrency(1)
        .with_max_abandoned(2);
    let running = Dispatcher::builder(db.url())
        .destination(hanging)
        .destination(Destination::manual("b", |_: &OutboxEntry| {
            Dispatched::completed()
        }))
        .start()
        .unwrap();
    let ids = enqueued(&db, 4);
    let mut conn = db.connect();
    for _ in 0..2 {
        arrivals.recv_timeout(SOON).unwrap();
    }
    // Two hang: that is the cap, and nothing more is claimed.
    eventually(SOON, "two abandoned", || {
        (running.stats().abandoned == 2).then_some(())
    });
    eventually(SOON, "two unknown", || {
        (with_status(&mut conn, "outcome_unknown") == 2).then_some(())
    });
    // The other destination flows, and is looked at after this one.
    let other = OutboxEntry::new("b", "k", &()).unwrap();
    enqueue(&mut conn, &other).unwrap();
    until_status(&mut conn, other.outbox_id, OutboxStatus::Completed);
    assert_eq!(running.stats().begun, 3);
    assert_eq!(with_status(&mut conn, "pending"), 2);
    let timed_out = ids
        .iter()
        .filter_map(|id| get(&mut conn, *id).unwrap().last_failure)
        .collect::<Vec<_>>();
    assert_eq!(timed_out, [code::SEND_TIMEOUT, code::SEND_TIMEOUT]);
    // They come back: their answers count, and the destination goes on.
    for _ in 0..4 {
        answer.send(Dispatched::completed()).unwrap();
    }
    for id in ids {
        until_status(&mut conn, id, OutboxStatus::Completed);
    }
    eventually(SOON, "two late answers", || {
        (running.stats().late_answers == 2).then_some(())
    });
    assert_eq!(running.stats().abandoned, 0);
}

#[test]
fn senders_that_exhaust_the_applications_pool_do_not_stop_settling() {
    let db = TestDb::new();
    let refused = Arc::new(AtomicUsize::new(0));
    let counting = Arc::clone(&refused);
    let pooled = diesel::r2d2::Pool::builder()
        .max_size(1)
        .connection_timeout(ms(200))
        .build(diesel::r2d2::ConnectionManager::<PgConnection>::new(
            db.url(),
        ))
        .unwrap();
    let outbox = PgOutbox::from_pool(pooled.clone());
    let taken = pooled.get().unwrap();
    let send = move |entry: &OutboxEntry| {
        if outbox.get(entry.outbox_id) == Err(StoreError::Unavailable) {
            counting.fetch_add(1, Ordering::SeqCst);
        }
        Dispatched::completed()
    };
    let running = dispatcher(&db, idempotent("a", send)).start().unwrap();
    let ids = enqueued(&db, 16);
    let mut conn = db.connect();
    for id in ids {
        until_status(&mut conn, id, OutboxStatus::Completed);
    }
    assert_eq!(refused.load(Ordering::SeqCst), 16);
    assert_eq!(running.stats().begun, 16);
    drop(taken);
}

/// Sessions of dispatchers in the database of `conn`.
#[derive(QueryableByName, PartialEq, Eq, Hash, Debug, Clone)]
struct Open {
    #[diesel(sql_type = diesel::sql_types::Integer)]
    pid: i32,
    /// When its transaction began, if it is in one.
    #[diesel(sql_type = diesel::sql_types::Nullable<diesel::sql_types::Text>)]
    since: Option<String>,
}

fn sessions_of_dispatchers(conn: &mut PgConnection) -> Vec<Open> {
    diesel::sql_query(
        "SELECT pid, xact_start::text AS since FROM pg_stat_activity
          WHERE datname = current_database() AND application_name LIKE 'diesel-outbox%'",
    )
    .load(conn)
    .unwrap()
}

// Q4
#[test]
fn a_dispatcher_needs_few_connections_and_none_of_the_applications() {
    let db = TestDb::new();
    let pooled = diesel::r2d2::Pool::builder()
        .max_size(1)
        .build(diesel::r2d2::ConnectionManager::<PgConnection>::new(
            db.url(),
        ))
        .unwrap();
    let taken = pooled.get().unwrap();
    enqueued(&db, 16);
    let send = |_: &OutboxEntry| {
        std::thread::sleep(Duration::from_secs(2));
        Dispatched::completed()
    };
    let started = Instant::now();
    let _running = dispatcher(&db, idempotent("a", send).with_concurrency(8))
        .start()
        .unwrap();
    let mut conn = db.connect();
    let mut most = 0;
    eventually(Duration::from_secs(8), "all completed", || {
        most = most.max(sessions_of_dispatchers(&mut conn).len());
        (with_status(&mut conn, "completed") == 16).then_some(())
    });
    assert!(started.elapsed() >= Duration::from_secs(4));
    assert!((1..=6).contains(&most), "{most} connections");
    drop(taken);
}

// Q5
#[test]
fn no_transaction_is_open_while_a_sender_runs() {
    let db = TestDb::new();
    let (arrived, arrivals) = unbounded();
    let send = move |entry: &OutboxEntry| {
        let _ = arrived.send(i_of(entry));
        std::thread::sleep(Duration::from_secs(5));
        Dispatched::completed()
    };
    let running = dispatcher(&db, idempotent("a", send).with_concurrency(4))
        .start()
        .unwrap();
    enqueued(&db, 4);
    for _ in 0..4 {
        arrivals.recv_timeout(SOON).unwrap();
    }
    let beside = dispatcher(&db, idempotent("b", |_| Dispatched::completed()))
        .start()
        .unwrap();
    let mut conn = db.connect();
    let other = OutboxEntry::new("b", "k", &json!({})).unwrap();
    enqueue(&mut conn, &other).unwrap();
    until_status(&mut conn, other.outbox_id, OutboxStatus::Completed);

    let mut before: Vec<Open> = Vec::new();
    let mut samples = 0;
    while running.stats().completed == 0 {
        let now: Vec<Open> = sessions_of_dispatchers(&mut conn)
            .into_iter()
            .filter(|session| session.since.is_some())
            .collect();
        let held: Vec<&Open> = now.iter().filter(|open| before.contains(open)).collect();
        assert!(held.is_empty(), "{held:?}");
        before = now;
        samples += 1;
        std::thread::sleep(ms(100));
    }
    assert!(samples > 10, "{samples}");
    assert_eq!(beside.stats().completed, 1);
}

#[test]
fn one_sweep_settles_what_is_due_and_ends() {
    let db = TestDb::new();
    let mut conn = db.connect();
    let mut batch = rows(30);
    batch[29].next_attempt_at = Some(Utc::now() + TimeDelta::hours(1));
    enqueue_all(&mut conn, &batch).unwrap();
    let destination = idempotent("a", |_| Dispatched::completed()).with_prefetch(0);
    let mut sweeper = dispatcher(&db, destination).build().unwrap();
    let stats = sweeper.run_once().unwrap();
    assert_eq!((stats.completed, stats.begun), (29, 29));
    assert_eq!(with_status(&mut conn, "completed"), 29);
    assert_eq!(sweeper.run_once().unwrap().begun, 0);
}

// K2, K6
#[test]
fn a_setting_without_sense_is_refused_by_name() {
    let on = |destination: Destination| {
        Dispatcher::builder("postgres://localhost/x").destination(destination)
    };
    let send = |_: &OutboxEntry| Dispatched::completed();
    let sound = || Destination::manual("a", send);
    let zero = Duration::ZERO;
    let backoff = Backoff::exponential(ms(100), ms(1_000));
    let with = |backoff| on(sound().with_backoff(backoff));
    let refused = [
        (Dispatcher::builder("x"), "destination"),
        (on(Destination::manual("", send)), "destination.name"),
        (on(sound()).destination(sound()), "destination.name"),
        (on(sound()).with_batch(0), "batch"),
        (on(sound()).with_lease(ms(1)), "lease"),
        (on(sound()).with_lease(Duration::MAX), "lease"),
        (on(sound()).with_poll(zero), "poll"),
        (on(sound()).with_foreign_lease(zero), "foreign_lease"),
        (
            on(sound()).with_maintenance_interval(zero),
            "maintenance_interval",
        ),
        (on(sound().with_concurrency(0)), "concurrency"),
        (on(sound().with_probes(0)), "probes"),
        (on(sound().with_max_probes(0)), "max_probes"),
        (on(sound().with_send_timeout(zero)), "send_timeout"),
        (on(sound().with_max_attempts(0)), "max_attempts"),
        (on(sound().with_max_abandoned(0)), "max_abandoned"),
        (on(sound().with_rate(0, SOON)), "rate"),
        (on(sound().with_rate(1, zero)), "rate"),
        (on(sound().with_breaker(0, SOON)), "breaker.failures"),
        (on(sound().with_breaker(1, zero)), "breaker.open_for"),
        (with(Backoff::exponential(zero, ms(1))), "backoff.initial"),
        (with(Backoff::exponential(ms(2), ms(1))), "backoff.max"),
        (with(backoff.with_multiplier(0.5)), "backoff.multiplier"),
        (with(backoff.with_jitter(1.5)), "backoff.jitter"),
    ];
    for (builder, field) in refused {
        assert_eq!(builder.build().unwrap_err().field(), field);
    }
}
