//! What becomes of a row whose outcome is unknown.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use chrono::{TimeDelta, Utc};
use crossbeam_channel::unbounded;
use diesel::prelude::*;
use diesel_outbox::schema::tf_outbox;
use diesel_outbox::{
    Backoff, Destination, Dispatched, OutboxEntry, OutboxId, OutboxRecord, OutboxStatus,
    Reconciled, claim_due, code, enqueue, get, mark_outcome_unknown,
};
use support::db::TestDb;
use support::dispatch::{
    SOON, dispatcher, enqueued, idempotent, ms, until_status, whole_row, with_status,
};
use support::wait::eventually;

#[test]
fn an_effect_that_lands_after_the_client_gave_up_is_found_and_not_repeated() {
    let db = TestDb::new();
    let effects = Arc::new(AtomicUsize::new(0));
    let early = Arc::new(AtomicBool::new(false));
    let timeout = ms(3_000);
    let landing = Arc::clone(&effects);
    // The remote applies the effect two seconds after the client gave up.
    let send = move |_: &OutboxEntry| {
        let landing = Arc::clone(&landing);
        std::thread::spawn(move || {
            std::thread::sleep(ms(2_000));
            landing.fetch_add(1, Ordering::SeqCst);
        });
        Dispatched::unknown()
    };
    let (asking, noting) = (Arc::clone(&effects), Arc::clone(&early));
    let reconcile = move |record: &OutboxRecord| {
        if record.unknown_for.unwrap() < timeout {
            noting.store(true, Ordering::SeqCst);
        }
        match asking.load(Ordering::SeqCst) {
            0 => Reconciled::Resend,
            _ => Reconciled::Completed,
        }
    };
    let destination = Destination::reconciled("a", send, reconcile).with_send_timeout(timeout);
    let running = dispatcher(&db, destination).start().unwrap();
    let ids = enqueued(&db, 1);
    until_status(&mut db.connect(), ids[0], OutboxStatus::Completed);
    assert_eq!(effects.load(Ordering::SeqCst), 1);
    assert!(!early.load(Ordering::SeqCst));
    eventually(SOON, "one answer", || {
        (running.stats().reconciled == 1).then_some(())
    });
    assert_eq!(running.stats().probes, 1);
}

#[test]
fn an_unresolved_outcome_is_asked_about_again_and_a_resend_calls_again() {
    let db = TestDb::new();
    let send = |entry: &OutboxEntry| match entry.attempt_count {
        1 => Dispatched::unknown(),
        _ => Dispatched::completed(),
    };
    let reconcile = |record: &OutboxRecord| match record.probe_count {
        1 => panic!("a reconciler's panic is an unresolved outcome"),
        2 => Reconciled::Unresolved,
        _ => Reconciled::Resend,
    };
    let destination = Destination::reconciled("a", send, reconcile)
        .with_settle_delay(Duration::ZERO)
        .with_probe_backoff(Backoff::exponential(ms(10), ms(10)));
    let running = dispatcher(&db, destination).start().unwrap();
    let ids = enqueued(&db, 1);
    let record = until_status(&mut db.connect(), ids[0], OutboxStatus::Completed);
    assert_eq!((record.entry.attempt_count, record.probe_count), (2, 3));
    assert_eq!((running.stats().resent, running.stats().panics), (1, 1));
}

#[test]
fn an_unknown_row_whose_attempts_are_spent_is_parked_and_not_failed() {
    let db = TestDb::new();
    let send = |_: &OutboxEntry| Dispatched::unknown();
    let running = dispatcher(&db, idempotent("a", send).with_max_attempts(2))
        .start()
        .unwrap();
    let ids = enqueued(&db, 1);
    let mut conn = db.connect();
    let record = eventually(SOON, "parked", || {
        get(&mut conn, ids[0])
            .ok()
            .filter(|r| r.last_failure.as_deref() == Some(code::ATTEMPTS_EXHAUSTED))
    });
    assert_eq!(record.entry.status, OutboxStatus::OutcomeUnknown);
    assert_eq!(record.entry.attempt_count, 2);
    assert_eq!(running.stats().begun, 2);
}

// S7
#[test]
fn an_unknown_outcome_of_a_manual_destination_is_not_touched() {
    let db = TestDb::new();
    let mut conn = db.connect();
    let ids = enqueued(&db, 1);
    claim_due(&mut conn, Utc::now(), 1, "w").unwrap();
    mark_outcome_unknown(&mut conn, ids[0], None).unwrap();
    let hour = TimeDelta::hours(1);
    diesel::update(tf_outbox::table.find(ids[0].0))
        .set(tf_outbox::next_attempt_at.eq(Utc::now() - hour))
        .execute(&mut conn)
        .unwrap();
    let before = whole_row(&mut conn, ids[0]);
    let running: Vec<_> = (0..2)
        .map(|_| {
            let send = |_: &OutboxEntry| Dispatched::completed();
            dispatcher(&db, Destination::manual("a", send))
                .with_lease(Duration::from_secs(1))
                .start()
                .unwrap()
        })
        .collect();
    // A foreign claim that lapses shows that maintenance has been round, twice.
    for round in 0..2 {
        let other = OutboxEntry::new("a", format!("round-{round}"), &()).unwrap();
        conn.transaction::<_, diesel::result::Error, _>(|conn| {
            enqueue(conn, &other).unwrap();
            diesel::update(tf_outbox::table.find(other.outbox_id.0))
                .set((
                    tf_outbox::status.eq("dispatching"),
                    tf_outbox::claim_worker_id.eq("gone"),
                    tf_outbox::claim_taken_at.eq(Utc::now() - hour),
                ))
                .execute(conn)
        })
        .unwrap();
        let record = until_status(&mut conn, other.outbox_id, OutboxStatus::OutcomeUnknown);
        assert_eq!(record.last_failure.as_deref(), Some(code::LAPSED));
        assert_eq!(record.lapse_count, 1);
    }
    assert!(running.iter().all(|d| d.stats().begun == 0));
    assert_eq!(whole_row(&mut conn, ids[0]), before);
}

/// Rows that are unknown already, under nobody's claim.
fn unknown(db: &TestDb, n: usize) -> Vec<OutboxId> {
    let ids = enqueued(db, n);
    let mut conn = db.connect();
    claim_due(&mut conn, Utc::now(), n, "w").unwrap();
    for id in &ids {
        mark_outcome_unknown(&mut conn, *id, None).unwrap();
    }
    ids
}

fn never_sent(_: &OutboxEntry) -> Dispatched {
    panic!("an unknown outcome is not sent again unasked")
}

#[test]
fn a_reconciler_slower_than_its_backoff_is_asked_once_and_believed() {
    let db = TestDb::new();
    let ids = unknown(&db, 1);
    let (asked, questions) = unbounded();
    let (answer, answers) = unbounded();
    let reconcile = move |record: &OutboxRecord| {
        asked.send(record.probe_count).unwrap();
        answers.recv().unwrap_or(Reconciled::Unresolved)
    };
    let destination = Destination::reconciled("a", never_sent, reconcile)
        .with_settle_delay(Duration::ZERO)
        .with_probe_backoff(Backoff::exponential(ms(1), ms(1)));
    // Two processes' worth: one of them asks, and the other must not.
    let running = [(); 2].map(|()| {
        dispatcher(&db, destination.clone())
            .with_maintenance_interval(ms(10))
            .start()
            .unwrap()
    });
    assert_eq!(questions.recv_timeout(SOON), Ok(1));
    // Many looks and many backoffs later.
    assert!(questions.recv_timeout(ms(500)).is_err());
    answer.send(Reconciled::Completed).unwrap();
    let record = until_status(&mut db.connect(), ids[0], OutboxStatus::Completed);
    assert_eq!(record.probe_count, 1);
    eventually(SOON, "one answer", || {
        (running.iter().map(|d| d.stats().reconciled).sum::<u64>() == 1).then_some(())
    });
}

#[test]
fn the_next_question_is_timed_from_the_answer() {
    let db = TestDb::new();
    let ids = unknown(&db, 1);
    let reconcile = |_: &OutboxRecord| Reconciled::Unresolved;
    let backoff = Backoff::exponential(Duration::from_secs(600), Duration::from_secs(600));
    let destination = Destination::reconciled("a", never_sent, reconcile)
        .with_settle_delay(Duration::ZERO)
        .with_send_timeout(Duration::from_secs(3_600))
        .with_probe_backoff(backoff.with_jitter(0.0));
    let _running = dispatcher(&db, destination).start().unwrap();
    let mut conn = db.connect();
    eventually(SOON, "a question in ten minutes", || {
        let record = get(&mut conn, ids[0]).unwrap();
        let wait = record.entry.next_attempt_at? - Utc::now();
        // At the claim it is an hour more.
        (wait < TimeDelta::seconds(601)).then(|| {
            assert!(wait > TimeDelta::seconds(580));
            assert_eq!(record.probe_count, 1);
            assert_eq!(record.entry.status, OutboxStatus::OutcomeUnknown);
        })
    });
}

#[test]
fn a_hanging_reconciler_is_left_behind_and_its_late_answer_is_used() {
    let db = TestDb::new();
    let ids = unknown(&db, 3);
    let stuck = ids[0];
    let (asked, questions) = unbounded();
    let (release, hold) = unbounded::<()>();
    let reconcile = move |record: &OutboxRecord| {
        if record.entry.outbox_id == stuck {
            asked.send(()).unwrap();
            let _ = hold.recv();
        }
        Reconciled::Completed
    };
    let destination = Destination::reconciled("a", never_sent, reconcile)
        .with_settle_delay(Duration::ZERO)
        .with_send_timeout(ms(300))
        .with_probe_backoff(Backoff::exponential(ms(1), ms(1)))
        .with_probes(1);
    let running = dispatcher(&db, destination).start().unwrap();
    questions.recv_timeout(SOON).unwrap();
    let mut conn = db.connect();
    for id in &ids[1..] {
        until_status(&mut conn, *id, OutboxStatus::Completed);
    }
    let stats = running.stats();
    assert_eq!((stats.timeouts, stats.abandoned, stats.probes), (1, 1, 3));
    // While its question hangs, the row is not asked about once more.
    assert!(questions.recv_timeout(ms(700)).is_err());
    release.send(()).unwrap();
    until_status(&mut conn, stuck, OutboxStatus::Completed);
    eventually(SOON, "the thread is back", || {
        (running.stats().abandoned == 0).then_some(())
    });
}

#[test]
fn one_sweep_asks_about_each_unknown_outcome_once() {
    let db = TestDb::new();
    unknown(&db, 30);
    let reconcile = |record: &OutboxRecord| match record.entry.payload["i"].as_u64() {
        Some(i) if i <= 20 => Reconciled::Completed,
        _ => Reconciled::Unresolved,
    };
    let destination = Destination::reconciled("a", never_sent, reconcile)
        .with_settle_delay(Duration::ZERO)
        .with_probe_backoff(Backoff::exponential(ms(1), ms(1)));
    let mut sweeper = dispatcher(&db, destination).build().unwrap();
    let stats = sweeper.run_once().unwrap();
    assert_eq!((stats.probes, stats.reconciled), (30, 20));
    let mut conn = db.connect();
    assert_eq!(with_status(&mut conn, "completed"), 20);
    assert_eq!(with_status(&mut conn, "outcome_unknown"), 10);
}

#[test]
fn a_stop_waits_for_an_answer_and_names_a_reconciler_that_hangs() {
    let db = TestDb::new();
    let ids = unknown(&db, 2);
    let slow = ids[0];
    let (asked, questions) = unbounded();
    let (release, hold) = unbounded::<()>();
    let (_never, for_ever) = unbounded::<()>();
    let reconcile = move |record: &OutboxRecord| {
        asked.send(()).unwrap();
        let gate = if record.entry.outbox_id == slow {
            &hold
        } else {
            &for_ever
        };
        let _ = gate.recv();
        Reconciled::Completed
    };
    let destination =
        Destination::reconciled("a", never_sent, reconcile).with_settle_delay(Duration::ZERO);
    let running = dispatcher(&db, destination).start().unwrap();
    for _ in 0..2 {
        questions.recv_timeout(SOON).unwrap();
    }
    let report = std::thread::scope(|scope| {
        let stopping = scope.spawn(|| running.stop(ms(1_000)));
        release.send(()).unwrap();
        stopping.join().unwrap()
    });
    let mut conn = db.connect();
    assert_eq!(report.left_running, 1);
    assert_eq!(with_status(&mut conn, "completed"), 1);
    assert_eq!(get(&mut conn, ids[1]).unwrap().probe_count, 1);
}

#[test]
fn an_outcome_that_nobody_can_resolve_ends_parked_and_visible() {
    let db = TestDb::new();
    let asked = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&asked);
    let reconcile = move |_: &OutboxRecord| {
        assert!(
            counted.fetch_add(1, Ordering::SeqCst) > 0,
            "the first panics"
        );
        Reconciled::Unresolved
    };
    let destination = Destination::reconciled("a", never_sent, reconcile)
        .with_settle_delay(Duration::ZERO)
        .with_probe_backoff(Backoff::exponential(ms(10), ms(10)))
        .with_max_probes(3);
    let id = unknown(&db, 1)[0];
    let running = dispatcher(&db, destination)
        .with_maintenance_interval(ms(20))
        .start()
        .unwrap();
    let mut conn = db.connect();
    let parked = eventually(SOON, "a row that is parked", || {
        get(&mut conn, id)
            .ok()
            .filter(|r| r.last_failure.as_deref() == Some(code::UNRESOLVED))
    });
    assert_eq!(parked.entry.status, OutboxStatus::OutcomeUnknown);
    assert_eq!((parked.probe_count, running.stats().parked), (3, 1));
    // Rounds go on, and nobody asks.
    std::thread::sleep(ms(300));
    assert_eq!(asked.load(Ordering::SeqCst), 3);
    // An operator's word is the last.
    diesel_outbox::mark_completed(&mut conn, id).unwrap();
    running.stop(SOON);
    let record = get(&mut conn, id).unwrap();
    assert_eq!(record.entry.status, OutboxStatus::Completed);
}

#[test]
fn a_row_that_was_asked_about_more_often_than_is_allowed_now_is_parked_unasked() {
    let db = TestDb::new();
    let id = unknown(&db, 1)[0];
    let hour = TimeDelta::hours(1);
    let mut conn = db.connect();
    diesel::update(tf_outbox::table.find(id.0))
        .set((
            tf_outbox::probe_count.eq(50),
            tf_outbox::next_attempt_at.eq(Utc::now() - hour),
        ))
        .execute(&mut conn)
        .unwrap();
    let reconcile = |_: &OutboxRecord| -> Reconciled { panic!("asked") };
    let destination = Destination::reconciled("a", never_sent, reconcile)
        .with_settle_delay(Duration::ZERO)
        .with_max_probes(10);
    let running = dispatcher(&db, destination).start().unwrap();
    let parked = eventually(SOON, "a row that is parked", || {
        get(&mut conn, id)
            .ok()
            .filter(|r| r.last_failure.as_deref() == Some(code::UNRESOLVED))
    });
    assert_eq!((parked.probe_count, running.stats().probes), (50, 0));
}

/// An operator and a reconciler answer about one row at the same moment.
#[test]
fn of_an_operator_and_a_reconciler_one_wins_and_the_other_is_refused() {
    const ROUNDS: usize = 40;
    let db = TestDb::new();
    let (thinks, thinking) = unbounded::<OutboxId>();
    let (go, word) = crossbeam_channel::bounded::<()>(0);
    let reconcile = move |record: &OutboxRecord| {
        thinks.send(record.entry.outbox_id).unwrap();
        let _ = word.recv();
        Reconciled::Failed {
            code: "x.never".to_owned(),
        }
    };
    let destination = Destination::reconciled("a", never_sent, reconcile)
        .with_settle_delay(Duration::ZERO)
        .with_probes(1);
    let ids = unknown(&db, ROUNDS);
    let running = dispatcher(&db, destination)
        .with_maintenance_interval(ms(10))
        .start()
        .unwrap();
    let mut conn = db.connect();
    let mut operators = 0;
    for round in 0..ROUNDS {
        let id = thinking.recv_timeout(SOON).unwrap();
        let end = |conn: &mut PgConnection| {
            eventually(SOON, "an end", || {
                get(conn, id)
                    .ok()
                    .filter(|record| record.entry.status.is_terminal())
            })
        };
        // Now the operator is first for sure, now the reconciler, and now nobody
        // knows.
        let operator = match round % 4 {
            0 => {
                let operator = diesel_outbox::mark_completed(&mut conn, id);
                go.send(()).unwrap();
                operator
            }
            1 => {
                go.send(()).unwrap();
                end(&mut conn);
                diesel_outbox::mark_completed(&mut conn, id)
            }
            _ => {
                go.send(()).unwrap();
                std::thread::sleep(Duration::from_micros(round as u64 * 50));
                diesel_outbox::mark_completed(&mut conn, id)
            }
        };
        let record = end(&mut conn);
        match operator {
            Ok(()) => {
                operators += 1;
                assert_eq!(record.entry.status, OutboxStatus::Completed);
                assert_eq!(record.last_failure, None);
            }
            Err(error) => {
                assert_eq!(error, diesel_outbox::StoreError::Conflict);
                assert_eq!(record.entry.status, OutboxStatus::Failed);
                assert_eq!(record.last_failure.as_deref(), Some("x.never"));
            }
        }
    }
    running.stop(SOON);
    let stats = running.stats();
    assert_eq!(stats.reconciled as usize, ROUNDS - operators);
    let failed = with_status(&mut conn, "failed") as usize;
    assert_eq!(failed, ROUNDS - operators);
    assert_eq!(ids.len(), ROUNDS);
    // Each had the better of the other at least once: the fault fired.
    assert!(
        operators > 0 && operators < ROUNDS,
        "{operators} of {ROUNDS}"
    );
}

#[test]
fn questions_never_starve_sends() {
    let db = TestDb::new();
    let (asked, questions) = unbounded();
    let (_never, gate) = crossbeam_channel::bounded::<()>(0);
    let reconcile = move |record: &OutboxRecord| {
        asked.send(record.entry.outbox_id).unwrap();
        let _ = gate.recv();
        Reconciled::Unresolved
    };
    let send = |entry: &OutboxEntry| {
        assert_eq!(entry.attempt_count, 1);
        Dispatched::completed()
    };
    let destination = Destination::reconciled("a", send, reconcile)
        .with_settle_delay(Duration::ZERO)
        .with_concurrency(2)
        .with_probes(3);
    unknown(&db, 20);
    let running = dispatcher(&db, destination).start().unwrap();
    for _ in 0..3 {
        questions.recv_timeout(SOON).unwrap();
    }
    let mut conn = db.connect();
    for i in 0..50 {
        let entry = OutboxEntry::new("a", format!("new-{i}"), &()).unwrap();
        enqueue(&mut conn, &entry).unwrap();
    }
    eventually(SOON, "all new ones completed", || {
        (with_status(&mut conn, "completed") == 50).then_some(())
    });
    // No more are asked at once than were allowed.
    assert!(questions.try_recv().is_err());
    drop(_never);
    running.stop(SOON);
}
