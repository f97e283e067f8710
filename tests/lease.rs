//! A claim holds while its process can renew it, and no longer.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::time::{Duration, Instant};

use chrono::{TimeDelta, Utc};
use crossbeam_channel::unbounded;
use diesel::prelude::*;
use diesel::sql_types::BigInt;
use diesel_outbox::schema::tf_outbox;
use diesel_outbox::{Dispatched, Dispatcher, OutboxEntry, OutboxStatus, enqueue, enqueue_all, get};
use serde_json::json;
use support::db::TestDb;
use support::dispatch::{
    SOON, dispatcher, enqueued, gated, i_of, idempotent, ms, rows, until_status, with_status,
};
use support::server::Server;
use support::wait::eventually;

const SECOND: Duration = Duration::from_secs(1);

// L1, in small
#[test]
fn a_lease_is_renewed_while_the_call_runs() {
    let db = TestDb::new();
    let (send, arrivals, answer) = gated();
    let lease = ms(1_500);
    let first = dispatcher(&db, idempotent("a", send))
        .with_lease(lease)
        .start()
        .unwrap();
    let ids = enqueued(&db, 1);
    arrivals.recv_timeout(SOON).unwrap();
    let second = dispatcher(&db, idempotent("a", |_| Dispatched::permanent("twice")))
        .with_lease(lease)
        .start()
        .unwrap();
    let mut conn = db.connect();
    let mut seen = std::collections::BTreeSet::new();
    eventually(SOON, "five renewals", || {
        let record = get(&mut conn, ids[0]).unwrap();
        assert_eq!(record.entry.status, OutboxStatus::Dispatching);
        seen.insert(record.claim.unwrap().claimed_at);
        (seen.len() > 5).then_some(())
    });
    answer.send(Dispatched::completed()).unwrap();
    let record = until_status(&mut conn, ids[0], OutboxStatus::Completed);
    assert_eq!(record.entry.attempt_count, 1);
    assert_eq!((first.stats().lapsed, second.stats().lapsed), (0, 0));
    assert_eq!(second.stats().begun, 0);
}

fn number(conn: &mut PgConnection, sql: &str) -> i64 {
    #[derive(QueryableByName)]
    struct Number {
        #[diesel(sql_type = BigInt)]
        n: i64,
    }
    diesel::sql_query(format!("SELECT ({sql})::bigint AS n"))
        .get_result::<Number>(conn)
        .unwrap()
        .n
}

/// A lease of nine seconds is renewed each three, and whoever renews it waits no
/// longer than three for the answer.
#[test]
fn a_frozen_renewal_is_made_on_another_connection_before_the_lease_is_over() {
    let server = Server::start();
    let db = TestDb::on(&server);
    let (send, arrivals, answer) = gated();
    let running = Dispatcher::builder(db.url())
        .destination(idempotent("a", send))
        .with_lease(9 * SECOND)
        .start()
        .unwrap();
    let beside = dispatcher(&db, idempotent("a", |_| Dispatched::completed()))
        .start()
        .unwrap();
    let id = eventually(SOON, "a row that the first one took", || {
        let id = enqueued_one(&db);
        arrivals.recv_timeout(ms(500)).ok().map(|_| id)
    });
    let mut conn = db.connect();
    let keeper = "SELECT coalesce(max(pid), 0) FROM pg_stat_activity
                   WHERE application_name = 'diesel-outbox-keeper' AND datname = current_database()";
    let frozen = eventually(SOON, "a renewal", || {
        i32::try_from(number(&mut conn, keeper))
            .ok()
            .filter(|pid| *pid > 0)
    });
    server.sigstop_session(frozen);
    // Longer than what is left of the lease.
    let since = Instant::now();
    eventually(SOON, "a session that is left behind", || {
        (running.stats().abandoned_sessions == 1).then_some(())
    });
    while since.elapsed() < 12 * SECOND {
        let record = get(&mut conn, id).unwrap();
        assert_eq!(record.entry.status, OutboxStatus::Dispatching);
        std::thread::sleep(ms(100));
    }
    server.sigcont_session(frozen);
    answer.send(Dispatched::completed()).unwrap();
    let record = until_status(&mut conn, id, OutboxStatus::Completed);
    assert_eq!((record.entry.attempt_count, record.lapse_count), (1, 0));
    assert_eq!((beside.stats().lapsed, running.stats().lost_claims), (0, 0));
}

fn enqueued_one(db: &TestDb) -> diesel_outbox::OutboxId {
    let key = uuid::Uuid::new_v4().to_string();
    let entry = OutboxEntry::new("a", key, &json!({ "i": 1 })).unwrap();
    enqueue(&mut db.connect(), &entry).unwrap();
    entry.outbox_id
}

#[test]
fn a_process_that_cannot_renew_claims_nothing_until_it_can() {
    let db = TestDb::new();
    // A sequence goes on in a transaction that fails.
    db.execute(
        "CREATE SEQUENCE refused;
         CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN
             PERFORM nextval('refused');
             RAISE EXCEPTION 'no renewal';
         END $$",
    );
    let (send, arrivals, answer) = gated();
    let running = dispatcher(&db, idempotent("a", send))
        .with_lease(2 * SECOND)
        .with_maintenance_interval(Duration::from_secs(600))
        .start()
        .unwrap();
    enqueued(&db, 1);
    assert_eq!(arrivals.recv_timeout(SOON), Ok(1));
    let mut conn = db.connect();
    db.execute(
        "CREATE TRIGGER refuse BEFORE UPDATE ON tf_outbox FOR EACH ROW
             WHEN (OLD.status = 'dispatching' AND NEW.status = 'dispatching')
             EXECUTE FUNCTION refuse()",
    );
    eventually(SOON, "a renewal that fails", || {
        (number(&mut conn, "SELECT count(*) FROM refused WHERE is_called") > 0).then_some(())
    });
    let second = OutboxEntry::new("a", "k2", &json!({ "i": 2 })).unwrap();
    enqueue(&mut conn, &second).unwrap();
    assert!(arrivals.recv_timeout(SECOND).is_err());
    assert_eq!(
        get(&mut conn, second.outbox_id)
            .unwrap()
            .entry
            .attempt_count,
        0
    );
    db.execute("DROP TRIGGER refuse ON tf_outbox");
    assert_eq!(arrivals.recv_timeout(SOON), Ok(2));
    for _ in 0..2 {
        answer.send(Dispatched::completed()).unwrap();
    }
    until_status(&mut conn, second.outbox_id, OutboxStatus::Completed);
    assert_eq!(running.stats().begun, 2);
}

#[test]
fn rows_that_wait_in_a_prefetch_keep_their_lease() {
    let db = TestDb::new();
    let (begun, begins) = unbounded();
    let send = move |entry: &OutboxEntry| {
        let _ = begun.send(i_of(entry));
        std::thread::sleep(ms(150));
        Dispatched::completed()
    };
    let slow = idempotent("a", send).with_concurrency(1).with_prefetch(30);
    let running = dispatcher(&db, slow).with_lease(SECOND).start().unwrap();
    enqueue_all(&mut db.connect(), &rows(30)).unwrap();
    eventually(SOON, "all claimed", || {
        (running.stats().claimed == 30).then_some(())
    });
    // Looks for lapsed claims all the while, and could take what is handed back.
    let beside = dispatcher(&db, idempotent("a", |_| Dispatched::unknown()))
        .with_maintenance_interval(ms(50))
        .start()
        .unwrap();
    let mut conn = db.connect();
    eventually(2 * SOON, "all completed", || {
        (with_status(&mut conn, "completed") == 30).then_some(())
    });
    let mut seen: Vec<u64> = begins.try_iter().collect();
    seen.sort_unstable();
    assert_eq!(seen, (1..=30).collect::<Vec<u64>>());
    assert_eq!((beside.stats().begun, beside.stats().lapsed), (0, 0));
    assert_eq!(running.stats().lapsed, 0);
}

#[test]
fn the_clock_of_the_host_that_enqueues_does_not_matter() {
    let db = TestDb::new();
    let (begun, begins) = unbounded();
    let send = move |entry: &OutboxEntry| {
        let _ = begun.send(i_of(entry));
        Dispatched::completed()
    };
    let _running = dispatcher(&db, idempotent("a", send)).start().unwrap();
    let mut conn = db.connect();
    let off = |i: u64, key: Option<&str>, by: TimeDelta| {
        let entry = OutboxEntry::new("a", format!("k{i}"), &json!({ "i": i }))
            .unwrap()
            .with_created_at(Utc::now() + by);
        match key {
            Some(key) => entry.ordering_key(key),
            None => entry,
        }
    };
    let hour = TimeDelta::hours(1);
    for entry in [
        off(1, None, -hour),
        off(2, None, hour),
        off(3, Some("x"), hour),
        off(4, Some("y"), -hour),
        off(5, None, TimeDelta::days(365_000)),
    ] {
        enqueue(&mut conn, &entry).unwrap();
    }
    let mut seen: Vec<u64> = (0..5).map(|_| begins.recv_timeout(SOON).unwrap()).collect();
    seen.sort_unstable();
    assert_eq!(seen, [1, 2, 3, 4, 5]);
    assert!(begins.recv_timeout(SECOND).is_err());
}

/// A claim of ours is judged by its own lease, whatever its `claim_taken_at` says.
#[test]
fn a_claim_from_the_future_is_neither_stuck_nor_taken_from_a_live_holder() {
    let db = TestDb::new();
    let (send, arrivals, answer) = gated();
    let running = dispatcher(&db, idempotent("a", send)).start().unwrap();
    let id = enqueued(&db, 1)[0];
    assert_eq!(arrivals.recv_timeout(SOON), Ok(1));
    let in_an_hour = Utc::now() + TimeDelta::hours(1);
    let mut conn = db.connect();
    let moved = diesel::update(tf_outbox::table.find(id.0))
        .set(tf_outbox::claim_taken_at.eq(in_an_hour))
        .execute(&mut conn)
        .unwrap();
    assert_eq!(moved, 1);
    // A foreign one, an hour ahead, belongs to nobody who lives.
    let foreign = OutboxEntry::new("a", "foreign", &json!({ "i": 2 })).unwrap();
    enqueue(&mut conn, &foreign).unwrap();
    diesel::update(tf_outbox::table.find(foreign.outbox_id.0))
        .set((
            tf_outbox::status.eq("dispatching"),
            tf_outbox::claim_worker_id.eq("somebody"),
            tf_outbox::claim_taken_at.eq(in_an_hour),
            tf_outbox::attempt_count.eq(1),
        ))
        .execute(&mut conn)
        .unwrap();
    // It may have been claimed before, and is not to be then.
    let second = arrivals.recv_timeout(SOON).unwrap();
    assert_eq!(second, 2);
    let record = get(&mut conn, id).unwrap();
    assert_eq!(record.entry.status, OutboxStatus::Dispatching);
    for _ in 0..3 {
        answer.send(Dispatched::completed()).unwrap();
    }
    let record = until_status(&mut conn, id, OutboxStatus::Completed);
    assert_eq!(record.entry.attempt_count, 1);
    until_status(&mut conn, foreign.outbox_id, OutboxStatus::Completed);
    assert!(running.stats().lapsed <= 1);
}
