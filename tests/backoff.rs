//! When a row is tried again, and how often.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::time::{Duration, Instant};

use chrono::{TimeDelta, Utc};
use crossbeam_channel::unbounded;
use diesel::prelude::*;
use diesel_outbox::schema::tf_outbox;
use diesel_outbox::{
    Backoff, Destination, Dispatched, Dispatcher, OutboxEntry, OutboxRecord, OutboxStatus, get,
};
use support::db::TestDb;
use support::dispatch::{SOON, dispatcher, enqueued, i_of, ms};
use support::wait::{eventually, stretched};

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);

fn exact(initial: Duration, max: Duration) -> Backoff {
    Backoff::exponential(initial, max).with_jitter(0.0)
}

/// One row through one call that ends retryably; what it then looks like, and how
/// far ahead of the server's clock its next attempt is, at the most.
fn after_one_call(
    answer: impl Fn(&OutboxEntry) -> Dispatched + Send + Sync + 'static,
    backoff: Backoff,
) -> (OutboxRecord, TimeDelta) {
    let db = TestDb::new();
    let destination = Destination::idempotent("a", answer).with_backoff(backoff);
    let running = dispatcher(&db, destination).start().unwrap();
    let id = enqueued(&db, 1)[0];
    let mut conn = db.connect();
    let record = eventually(SOON, "a row put back", || {
        get(&mut conn, id)
            .ok()
            .filter(|record| record.entry.next_attempt_at.is_some())
    });
    let wait = record.entry.next_attempt_at.unwrap() - Utc::now();
    eventually(SOON, "the count of it", || {
        (running.stats().retried == 1).then_some(())
    });
    (record, wait)
}

// K3
#[test]
fn a_full_batch_of_failures_is_not_claimed_again_at_once() {
    let db = TestDb::new();
    let (begun, begins) = unbounded();
    let destination = Destination::idempotent("a", move |entry: &OutboxEntry| {
        let _ = begun.send(i_of(entry));
        Dispatched::retryable("x.down")
    })
    .with_backoff(exact(Duration::from_secs(10), HOUR));
    enqueued(&db, 10);
    let running = dispatcher(&db, destination).with_batch(10).start().unwrap();
    for _ in 0..10 {
        begins.recv_timeout(SOON).unwrap();
    }
    assert!(begins.recv_timeout(Duration::from_secs(5)).is_err());
    assert_eq!(running.stats().retried, 10);
}

// K4
#[test]
fn the_delay_runs_from_the_answer_and_not_from_the_claim() {
    let slow = |_: &OutboxEntry| {
        std::thread::sleep(Duration::from_secs(5));
        Dispatched::retryable("x.down")
    };
    let (record, wait) = after_one_call(slow, exact(Duration::from_secs(2), HOUR));
    assert_eq!(record.last_failure.as_deref(), Some("x.down"));
    let two = TimeDelta::seconds(2);
    assert!(
        wait <= two && wait >= two - TimeDelta::milliseconds(500),
        "{wait}"
    );
}

#[test]
fn the_remotes_own_wish_is_kept_within_the_bounds() {
    let backoff = exact(Duration::from_secs(10), Duration::from_secs(100));
    for (wish, kept) in [(0, 10), (50, 50), (1_000_000, 100)] {
        let answer =
            move |_: &OutboxEntry| Dispatched::retryable_after("x.busy", Duration::from_secs(wish));
        let (record, wait) = after_one_call(answer, backoff);
        let kept = TimeDelta::seconds(kept);
        assert!(
            wait <= kept && wait > kept - TimeDelta::seconds(5),
            "{wish}: {wait}"
        );
        assert_eq!(record.last_failure.as_deref(), Some("x.busy"));
    }
}

#[test]
fn a_wish_for_ever_is_the_longest_delay_and_the_attempt_counts() {
    let answer = |_: &OutboxEntry| Dispatched::retryable_after("x.busy", Duration::MAX);
    let (record, wait) = after_one_call(answer, exact(SECOND, HOUR));
    assert!(
        wait <= TimeDelta::hours(1) && wait > TimeDelta::minutes(59),
        "{wait}"
    );
    assert_eq!(record.entry.attempt_count, 1);
}

/// The longest settings are settings, and none of them overflows anything.
#[test]
fn the_largest_settings_are_defined() {
    let db = TestDb::new();
    let forever = exact(Duration::MAX, Duration::MAX).with_multiplier(f64::MAX);
    let destination = Destination::idempotent("a", |_: &OutboxEntry| Dispatched::retryable("x"))
        .with_backoff(forever)
        .with_max_attempts(u32::MAX)
        .with_send_timeout(Duration::MAX)
        .with_settle_delay(Duration::MAX)
        .with_probe_backoff(forever)
        .with_rate(u32::MAX, Duration::MAX)
        .with_breaker(u32::MAX, Duration::MAX);
    let running = Dispatcher::builder(db.url())
        .destination(destination)
        .with_lease(24 * HOUR)
        .with_poll(Duration::MAX)
        .with_foreign_lease(Duration::MAX)
        .with_maintenance_interval(Duration::MAX)
        .start()
        .unwrap();
    let id = enqueued(&db, 1)[0];
    let mut conn = db.connect();
    eventually(SOON, "a row put back", || {
        get(&mut conn, id)
            .ok()
            .and_then(|record| record.entry.next_attempt_at)
    });
    assert!(running.stop(SOON).blocked.is_empty());
    assert_eq!(running.stats().retried, 1);
}

#[test]
fn jitter_spreads_rows_that_failed_together() {
    let db = TestDb::new();
    let destination = Destination::idempotent("a", |_: &OutboxEntry| Dispatched::retryable("x"))
        .with_backoff(Backoff::exponential(Duration::from_secs(1_000), HOUR));
    enqueued(&db, 100);
    let running = dispatcher(&db, destination).start().unwrap();
    eventually(SOON, "all put back", || {
        (running.stats().retried == 100).then_some(())
    });
    let now = Utc::now();
    let waits: Vec<i64> = tf_outbox::table
        .select(tf_outbox::next_attempt_at.assume_not_null())
        .load::<chrono::DateTime<Utc>>(&mut db.connect())
        .unwrap()
        .into_iter()
        .map(|at| (at - now).num_seconds())
        .collect();
    let within = |from: i64, to: i64| waits.iter().filter(|w| (from..to).contains(w)).count();
    assert_eq!(within(-10, 1_001), 100);
    // Each quarter is empty once in ten million million runs.
    for quarter in 0..4 {
        assert!(within(quarter * 250 - 10, quarter * 250 + 250) > 0);
    }
}

/// The row is found again when its time has come, without a poll.
#[test]
fn a_row_in_backoff_is_tried_again_when_it_is_due() {
    let db = TestDb::new();
    let (begun, begins) = unbounded();
    let destination = Destination::idempotent("a", move |entry: &OutboxEntry| {
        let _ = begun.send(Instant::now());
        match entry.attempt_count {
            1..3 => Dispatched::retryable("x"),
            _ => Dispatched::completed(),
        }
    })
    .with_backoff(exact(ms(500), HOUR));
    let _running = dispatcher(&db, destination)
        .with_poll(Duration::from_secs(60))
        .start()
        .unwrap();
    let id = enqueued(&db, 1)[0];
    let at: Vec<Instant> = (0..3).map(|_| begins.recv_timeout(SOON).unwrap()).collect();
    let (first, second) = (at[1] - at[0], at[2] - at[1]);
    assert!(
        first >= ms(500) && first < stretched(ms(1_000)),
        "{first:?}"
    );
    assert!(
        second >= ms(1_000) && second < stretched(ms(1_500)),
        "{second:?}"
    );
    support::dispatch::until_status(&mut db.connect(), id, OutboxStatus::Completed);
}

// C10
#[test]
fn a_pile_of_retries_does_not_starve_fresh_rows_of_its_destination() {
    let db = TestDb::new();
    let destination =
        Destination::idempotent("a", |entry: &OutboxEntry| {
            match entry.payload["old"].as_bool() {
                Some(true) => Dispatched::retryable("x.down"),
                _ => Dispatched::completed(),
            }
        })
        .with_concurrency(4)
        .with_max_attempts(u32::MAX)
        .with_backoff(exact(SECOND, SECOND));
    let start = Utc::now() - TimeDelta::hours(1);
    let row = |i: i32, old: bool| {
        OutboxEntry::new("a", format!("k{i}"), &serde_json::json!({ "old": old }))
            .unwrap()
            .with_created_at(start + TimeDelta::seconds(1) * i)
    };
    let old: Vec<_> = (0..1_000).map(|i| row(i, true)).collect();
    let new: Vec<_> = (1_000..1_200).map(|i| row(i, false)).collect();
    let mut conn = db.connect();
    diesel_outbox::enqueue_all(&mut conn, &old).unwrap();
    diesel_outbox::enqueue_all(&mut conn, &new).unwrap();
    let running = dispatcher(&db, destination).with_batch(50).start().unwrap();
    eventually(3 * SOON, "all new rows completed", || {
        (support::dispatch::with_status(&mut conn, "completed") == 200).then_some(())
    });
    let before = running.stats().retried;
    eventually(SOON, "retries that go on", || {
        (running.stats().retried > before + 100).then_some(())
    });
}
