//! The transitions, by id: on a caller's connection and on the store.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::collections::HashSet;
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};
use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::sql_types::Text;
use diesel_outbox::schema::tf_outbox;
use diesel_outbox::{
    CommandId, EnqueueLimits, Enqueued, OutboxEntry, OutboxId, OutboxReader, OutboxStatus,
    OutboxWriter, PgOutbox, StoreError, claim_due, code, enqueue, enqueue_all, enqueue_once, get,
    list_for_command, mark_completed, mark_failed, mark_outcome_unknown, redrive,
    release_expired_claims, reschedule,
};
use serde_json::{Value, json};
use support::db::TestDb;
use uuid::Uuid;

fn at(seconds: i64) -> DateTime<Utc> {
    "2026-01-01T00:00:00Z".parse::<DateTime<Utc>>().unwrap() + TimeDelta::seconds(seconds)
}

/// R1..Rn of the cases.
fn rows(n: i64) -> Vec<OutboxEntry> {
    (1..=n)
        .map(|i| {
            OutboxEntry::new("a", format!("k{i}"), &json!({ "i": i }))
                .unwrap()
                .with_created_at(at(i))
        })
        .collect()
}

fn enqueued(db: &TestDb, n: i64) -> (PgConnection, Vec<OutboxId>) {
    let mut conn = db.connect();
    let rows = rows(n);
    enqueue_all(&mut conn, &rows).unwrap();
    (conn, rows.iter().map(|row| row.outbox_id).collect())
}

/// Every column of a row and its version, as the server prints them.
fn whole_row(conn: &mut PgConnection, id: OutboxId) -> String {
    #[derive(QueryableByName)]
    struct Row {
        #[diesel(sql_type = Text)]
        text: String,
    }
    diesel::sql_query(
        "SELECT t::text || ' ' || t.xmin::text AS text FROM tf_outbox t WHERE outbox_id = $1",
    )
    .bind::<diesel::sql_types::Uuid, _>(id.0)
    .get_result::<Row>(conn)
    .unwrap()
    .text
}

fn ids(entries: &[OutboxEntry]) -> Vec<OutboxId> {
    entries.iter().map(|entry| entry.outbox_id).collect()
}

fn status(conn: &mut PgConnection, id: OutboxId) -> OutboxStatus {
    get(conn, id).unwrap().entry.status
}

// ------------------------------------------------------------------ enqueue

#[test]
fn a_rolled_back_row_is_gone_and_a_committed_one_is_there() {
    let db = TestDb::new();
    let mut conn = db.connect();
    let entry = &rows(1)[0];
    conn.test_transaction::<_, diesel::result::Error, _>(|conn| {
        enqueue(conn, entry).unwrap();
        Ok(())
    });
    assert_eq!(get(&mut conn, entry.outbox_id), Err(StoreError::NotFound));
    enqueue(&mut conn, entry).unwrap();
    assert_eq!(get(&mut conn, entry.outbox_id).unwrap().entry, *entry);
}

// E1
#[test]
fn a_duplicate_is_a_conflict_that_leaves_the_transaction_usable() {
    let db = TestDb::new();
    let mut conn = db.connect();
    let first = rows(1).remove(0);
    conn.transaction::<_, diesel::result::Error, _>(|conn| {
        enqueue(conn, &first).unwrap();
        let same_id = OutboxEntry::new("b", "other", &())
            .unwrap()
            .with_id(first.outbox_id);
        assert_eq!(enqueue(conn, &same_id), Err(StoreError::Conflict));
        let same_key = OutboxEntry::new("a", "k1", &()).unwrap();
        assert_eq!(enqueue(conn, &same_key), Err(StoreError::Conflict));
        let elsewhere = OutboxEntry::new("b", "k1", &()).unwrap();
        assert_eq!(enqueue(conn, &elsewhere), Ok(()));
        Ok(())
    })
    .unwrap();
    let n: i64 = tf_outbox::table.count().get_result(&mut conn).unwrap();
    assert_eq!(n, 2);
}

#[test]
fn enqueue_once_says_what_is_there() {
    let db = TestDb::new();
    let mut conn = db.connect();
    let first = rows(1).remove(0);
    assert_eq!(enqueue_once(&mut conn, &first), Ok(Enqueued::New));
    let again = OutboxEntry::new("a", "k1", &json!({ "i": 1 })).unwrap();
    let duplicate = |same_payload| Enqueued::Duplicate {
        outbox_id: first.outbox_id,
        same_payload,
    };
    assert_eq!(enqueue_once(&mut conn, &again), Ok(duplicate(true)));
    let other = OutboxEntry::new("a", "k1", &json!({ "i": 2 })).unwrap();
    assert_eq!(enqueue_once(&mut conn, &other), Ok(duplicate(false)));
    let same_id = OutboxEntry::new("a", "k9", &())
        .unwrap()
        .with_id(first.outbox_id);
    assert_eq!(enqueue_once(&mut conn, &same_id), Err(StoreError::Conflict));
}

#[test]
fn enqueue_all_is_all_or_nothing() {
    let db = TestDb::new();
    let (mut conn, _) = enqueued(&db, 1);
    let mut batch = rows(3);
    conn.transaction::<_, diesel::result::Error, _>(|conn| {
        assert_eq!(enqueue_all(conn, &batch), Err(StoreError::Conflict));
        Ok(())
    })
    .unwrap();
    let twice = vec![batch[1].clone(), batch[1].clone()];
    assert_eq!(enqueue_all(&mut conn, &twice), Err(StoreError::Conflict));
    let n: i64 = tf_outbox::table.count().get_result(&mut conn).unwrap();
    assert_eq!(n, 1);
    batch.remove(0);
    enqueue_all(&mut conn, &batch).unwrap();
    enqueue_all(&mut conn, &[]).unwrap();
    let many: Vec<_> = (0..2_500)
        .map(|i| OutboxEntry::new("m", format!("{i}"), &i).unwrap())
        .collect();
    enqueue_all(&mut conn, &many).unwrap();
    let n: i64 = tf_outbox::table.count().get_result(&mut conn).unwrap();
    assert_eq!(n, 2_503);
}

// N5
#[test]
fn every_json_value_comes_back_as_it_was() {
    let db = TestDb::new();
    let mut conn = db.connect();
    let values = [
        Value::Null,
        json!("x"),
        json!([]),
        json!({}),
        json!({"": ""}),
        json!("🦀\u{ffff}"),
        json!(18_446_744_073_709_551_615_u64),
        json!(-9_223_372_036_854_775_808_i64),
        json!(0.1),
    ];
    for (i, value) in values.iter().enumerate() {
        let entry = OutboxEntry::new("a", format!("k{i}"), value).unwrap();
        enqueue(&mut conn, &entry).unwrap();
        assert_eq!(
            get(&mut conn, entry.outbox_id).unwrap().entry.payload,
            *value
        );
    }
    let claimed = claim_due(&mut conn, Utc::now(), 100, "w").unwrap();
    let mut sent: Vec<_> = claimed.into_iter().map(|entry| entry.payload).collect();
    for value in values {
        let i = sent.iter().position(|v| *v == value).unwrap();
        sent.remove(i);
    }
}

// N3
#[test]
fn instants_are_cut_to_microseconds_whatever_the_session_zone() {
    let db = TestDb::new();
    let mut conn = db.connect();
    conn.batch_execute("SET TIME ZONE 'Europe/Paris'").unwrap();
    let mut entry = OutboxEntry::new("a", "k", &()).unwrap();
    entry.created_at = "2026-10-25T01:30:00.123456789Z".parse().unwrap();
    entry.next_attempt_at = Some("2026-10-25T01:30:59.999999999Z".parse().unwrap());
    enqueue(&mut conn, &entry).unwrap();
    let stored = get(&mut conn, entry.outbox_id).unwrap().entry;
    assert_eq!(
        stored.created_at,
        "2026-10-25T01:30:00.123456Z"
            .parse::<DateTime<Utc>>()
            .unwrap()
    );
    assert_eq!(
        stored.next_attempt_at,
        Some("2026-10-25T01:30:59.999999Z".parse().unwrap())
    );
}

#[test]
fn the_rows_of_a_command_are_listed_oldest_first() {
    let db = TestDb::new();
    let mut conn = db.connect();
    let command = CommandId::new();
    let mut batch = rows(3);
    batch.reverse();
    for entry in &mut batch {
        entry.command_id = command;
    }
    enqueue_all(&mut conn, &batch).unwrap();
    let listed = list_for_command(&mut conn, command).unwrap();
    batch.reverse();
    assert_eq!(
        listed
            .iter()
            .map(|record| record.entry.outbox_id)
            .collect::<Vec<_>>(),
        ids(&batch)
    );
    assert_eq!(
        list_for_command(&mut conn, CommandId::new()),
        Ok(Vec::new())
    );
}

// -------------------------------------------------------------------- claim

// C1, and each of the joins off in turn
#[test]
fn no_plan_claims_more_than_the_limit() {
    for settings in [
        "SET enable_hashjoin = off; SET enable_mergejoin = off; SET enable_material = off;
         SET enable_hashagg = off; SET enable_sort = off; SET enable_indexscan = off;
         SET enable_bitmapscan = off",
        "SET enable_hashjoin = off",
        "SET enable_mergejoin = off",
        "SET enable_material = off",
    ] {
        let db = TestDb::new();
        let mut conn = db.connect();
        conn.batch_execute("ALTER TABLE tf_outbox SET (autovacuum_enabled = off)")
            .unwrap();
        let rows = rows(101);
        enqueue_all(&mut conn, &rows[..1]).unwrap();
        conn.batch_execute("ANALYZE tf_outbox").unwrap();
        enqueue_all(&mut conn, &rows[1..]).unwrap();
        conn.batch_execute(settings).unwrap();
        let claimed = claim_due(&mut conn, Utc::now(), 5, "w").unwrap();
        assert_eq!(ids(&claimed), ids(&rows[..5]));
        let pending: i64 = tf_outbox::table
            .filter(tf_outbox::status.eq("pending"))
            .count()
            .get_result(&mut conn)
            .unwrap();
        assert_eq!(pending, 96);
    }
}

// C3
#[test]
fn a_locked_row_is_passed_over() {
    let db = TestDb::new();
    let (mut conn, id) = enqueued(&db, 3);
    let mut other = db.connect();
    other.batch_execute("BEGIN").unwrap();
    let locked: Uuid = tf_outbox::table
        .find(id[0].0)
        .select(tf_outbox::outbox_id)
        .for_update()
        .get_result(&mut other)
        .unwrap();
    assert_eq!(locked, id[0].0);
    let begun = Instant::now();
    let claimed = claim_due(&mut conn, Utc::now(), 2, "w").unwrap();
    assert!(begun.elapsed() < support::wait::stretched(Duration::from_secs(1)));
    assert_eq!(ids(&claimed), id[1..]);
    let first = get(&mut conn, id[0]).unwrap().entry;
    assert_eq!(
        (first.status, first.attempt_count),
        (OutboxStatus::Pending, 0)
    );
}

// C4, C7
#[test]
fn only_rows_due_at_the_instant_are_claimed() {
    let db = TestDb::new();
    let mut conn = db.connect();
    let t = at(1_000);
    let mut batch = rows(3);
    batch[0].next_attempt_at = Some(t);
    batch[1].next_attempt_at = Some(t + TimeDelta::microseconds(1));
    enqueue_all(&mut conn, &batch).unwrap();
    let claimed = claim_due(&mut conn, t, 2, "w").unwrap();
    assert_eq!(ids(&claimed), [batch[0].outbox_id, batch[2].outbox_id]);
    for entry in &claimed {
        assert_eq!(
            (entry.status, entry.attempt_count),
            (OutboxStatus::Dispatching, 1)
        );
        let claim = get(&mut conn, entry.outbox_id).unwrap().claim.unwrap();
        assert_eq!((claim.worker_id.as_str(), claim.claimed_at), ("w", t));
    }
}

// C5
#[test]
fn rows_of_one_instant_are_claimed_by_id() {
    let db = TestDb::new();
    let mut conn = db.connect();
    for n in [3_u128, 2, 1] {
        let entry = OutboxEntry::new("a", format!("k{n}"), &())
            .unwrap()
            .with_id(OutboxId(Uuid::from_u128(n)))
            .with_created_at(at(0));
        enqueue(&mut conn, &entry).unwrap();
    }
    let claimed = claim_due(&mut conn, Utc::now(), 2, "w").unwrap();
    assert_eq!(ids(&claimed), [1, 2].map(|n| OutboxId(Uuid::from_u128(n))));
}

// C6
#[test]
fn limits_of_zero_and_of_all_are_defined() {
    let db = TestDb::new();
    let (mut conn, id) = enqueued(&db, 3);
    let before = whole_row(&mut conn, id[0]);
    assert_eq!(claim_due(&mut conn, Utc::now(), 0, "w"), Ok(Vec::new()));
    assert_eq!(whole_row(&mut conn, id[0]), before);
    assert_eq!(
        claim_due(&mut conn, Utc::now(), usize::MAX, "w")
            .unwrap()
            .len(),
        3
    );
}

// C11, and ten claimers on 5,000 rows with each of the joins off in turn
#[test]
fn many_claimers_take_each_row_once_under_any_isolation_and_plan() {
    for (settings, claimers, rows_in_all) in [
        ("SET enable_hashjoin = off", 10, 5_000_usize),
        ("SET enable_mergejoin = off", 10, 5_000),
        ("SET enable_material = off", 10, 5_000),
        (
            "SET default_transaction_isolation = 'repeatable read'",
            8,
            1_000,
        ),
        (
            "SET default_transaction_isolation = 'serializable'",
            8,
            1_000,
        ),
    ] {
        let db = TestDb::new();
        let batch = rows(rows_in_all as i64);
        enqueue_all(&mut db.connect(), &batch).unwrap();
        let seen = Mutex::new(Vec::new());
        let start = Barrier::new(claimers);
        std::thread::scope(|scope| {
            for n in 0..claimers {
                let (db, seen, start) = (&db, &seen, &start);
                scope.spawn(move || {
                    let mut conn = db.connect();
                    conn.batch_execute(settings).unwrap();
                    start.wait();
                    let mut quiet = 0;
                    while quiet < 3 {
                        match claim_due(&mut conn, Utc::now(), 10, &format!("w{n}")) {
                            Ok(claimed) if claimed.is_empty() => quiet += 1,
                            Ok(claimed) => {
                                assert!(claimed.len() <= 10);
                                quiet = 0;
                                seen.lock().unwrap().extend(ids(&claimed));
                            }
                            Err(error) => assert_eq!(error, StoreError::Conflict),
                        }
                    }
                });
            }
        });
        let seen = seen.into_inner().unwrap();
        assert_eq!(seen.len(), rows_in_all, "{settings}");
        assert_eq!(seen.iter().collect::<HashSet<_>>().len(), rows_in_all);
        let once: i64 = tf_outbox::table
            .filter(tf_outbox::attempt_count.eq(1))
            .count()
            .get_result(&mut db.connect())
            .unwrap();
        assert_eq!(once, rows_in_all as i64);
    }
}

#[test]
fn one_row_that_cannot_be_decoded_is_failed_and_nine_are_claimed() {
    let db = TestDb::new();
    let (mut conn, id) = enqueued(&db, 10);
    diesel::sql_query("UPDATE tf_outbox SET created_at = 'infinity' WHERE outbox_id = $1")
        .bind::<diesel::sql_types::Uuid, _>(id[4].0)
        .execute(&mut conn)
        .unwrap();
    let claimed = claim_due(&mut conn, Utc::now(), 10, "w").unwrap();
    assert_eq!(claimed.len(), 9);
    assert_eq!(
        get(&mut conn, id[4]),
        Err(StoreError::Corrupt {
            field: Some("created_at")
        })
    );
    let (status, reason, holder): (String, Option<String>, Option<String>) = tf_outbox::table
        .find(id[4].0)
        .select((
            tf_outbox::status,
            tf_outbox::last_failure,
            tf_outbox::claim_worker_id,
        ))
        .get_result(&mut conn)
        .unwrap();
    assert_eq!(
        (status.as_str(), reason.as_deref(), holder),
        ("failed", Some(code::CORRUPT_ROW), None)
    );
}

#[test]
fn a_row_at_the_end_of_its_counter_is_passed_over() {
    let db = TestDb::new();
    let (mut conn, id) = enqueued(&db, 2);
    diesel::update(tf_outbox::table.find(id[0].0))
        .set(tf_outbox::attempt_count.eq(i32::MAX))
        .execute(&mut conn)
        .unwrap();
    assert_eq!(
        ids(&claim_due(&mut conn, Utc::now(), 5, "w").unwrap()),
        id[1..]
    );
}

// N4
#[test]
fn a_row_of_unknown_status_is_corrupt_and_never_touched() {
    let db = TestDb::new();
    let mut conn = db.connect();
    let command = CommandId::new();
    let batch: Vec<_> = rows(2)
        .into_iter()
        .map(|row| row.caused_by(command))
        .collect();
    enqueue_all(&mut conn, &batch).unwrap();
    let weird = batch[0].outbox_id;
    diesel::update(tf_outbox::table.find(weird.0))
        .set(tf_outbox::status.eq("weird"))
        .execute(&mut conn)
        .unwrap();
    let before = whole_row(&mut conn, weird);
    let corrupt = Err(StoreError::Corrupt {
        field: Some("status"),
    });
    assert_eq!(get(&mut conn, weird).map(drop), corrupt);
    assert_eq!(list_for_command(&mut conn, command).map(drop), corrupt);
    assert_eq!(
        ids(&claim_due(&mut conn, Utc::now(), 5, "w").unwrap()),
        [batch[1].outbox_id]
    );
    assert_eq!(mark_completed(&mut conn, weird), corrupt);
    assert_eq!(whole_row(&mut conn, weird), before);
}

#[test]
fn a_negative_attempt_count_is_corrupt() {
    let db = TestDb::new();
    let (mut conn, id) = enqueued(&db, 1);
    conn.batch_execute(
        "ALTER TABLE tf_outbox DROP CONSTRAINT tf_outbox_attempt_count_check;
         UPDATE tf_outbox SET attempt_count = -1",
    )
    .unwrap();
    let corrupt = StoreError::Corrupt {
        field: Some("attempt_count"),
    };
    assert_eq!(get(&mut conn, id[0]), Err(corrupt));
}

// ------------------------------------------------------------------- settle

fn claimed(db: &TestDb, n: i64) -> (PgConnection, Vec<OutboxId>) {
    let (mut conn, id) = enqueued(db, n);
    assert_eq!(
        claim_due(&mut conn, Utc::now(), 100, "w").unwrap().len(),
        n as usize
    );
    (conn, id)
}

// S4
#[test]
fn completing_twice_keeps_the_first_time() {
    let db = TestDb::new();
    let (mut conn, id) = claimed(&db, 1);
    mark_completed(&mut conn, id[0]).unwrap();
    let first = whole_row(&mut conn, id[0]);
    mark_completed(&mut conn, id[0]).unwrap();
    assert_eq!(whole_row(&mut conn, id[0]), first);
    let record = get(&mut conn, id[0]).unwrap();
    assert_eq!(record.claim, None);
    assert!(record.entry.completed_at.is_some());
}

// S3
#[test]
fn a_refused_transition_writes_nothing_at_all() {
    let db = TestDb::new();
    let (mut conn, id) = claimed(&db, 1);
    mark_completed(&mut conn, id[0]).unwrap();
    let before = whole_row(&mut conn, id[0]);
    let conflict = Err(StoreError::Conflict);
    assert_eq!(mark_failed(&mut conn, id[0], "x", None), conflict);
    assert_eq!(mark_failed(&mut conn, id[0], "x", Some(at(0))), conflict);
    assert_eq!(reschedule(&mut conn, id[0], at(0)), conflict);
    assert_eq!(mark_outcome_unknown(&mut conn, id[0], Some("r")), conflict);
    assert_eq!(redrive(&mut conn, id[0]), conflict);
    assert_eq!(whole_row(&mut conn, id[0]), before);
}

// S2, by id
#[test]
fn a_row_settled_by_someone_else_meanwhile_stays_as_it_was_settled() {
    let db = TestDb::new();
    let (mut conn, id) = claimed(&db, 1);
    db.execute(
        "UPDATE tf_outbox SET status = 'failed', completed_at = '2026-01-02', last_failure = 'x',
                claim_worker_id = NULL, claim_taken_at = NULL",
    );
    let before = whole_row(&mut conn, id[0]);
    let conflict = Err(StoreError::Conflict);
    assert_eq!(mark_completed(&mut conn, id[0]), conflict);
    assert_eq!(mark_outcome_unknown(&mut conn, id[0], Some("r")), conflict);
    assert_eq!(mark_failed(&mut conn, id[0], "y", Some(at(9))), conflict);
    assert_eq!(whole_row(&mut conn, id[0]), before);
}

// X2, as far as the store
#[test]
fn names_that_look_like_sql_are_names() {
    let name = "'; drop table tf_outbox; --";
    let db = TestDb::new();
    let outbox = PgOutbox::connect(db.url()).unwrap();
    let entry = OutboxEntry::new(name, "%s$1{}", &name).unwrap();
    outbox.enqueue(&entry).unwrap();
    let claimed = outbox.claim_due(Utc::now(), 1, name).unwrap();
    assert_eq!(claimed[0].destination, name);
    assert_eq!(claimed[0].idempotency_key, "%s$1{}");
    assert_eq!(claimed[0].payload, json!(name));
    let record = outbox.get(entry.outbox_id).unwrap();
    assert_eq!(record.claim.unwrap().worker_id, name);
    outbox
        .mark_outcome_unknown(entry.outbox_id, Some(name))
        .unwrap();
    outbox.mark_failed(entry.outbox_id, name, None).unwrap();
    let record = outbox.get(entry.outbox_id).unwrap();
    assert_eq!(record.remote_ref.as_deref(), Some(name));
    assert_eq!(record.last_failure.as_deref(), Some(name));
}

// N2, as far as the store
#[test]
fn an_instant_is_the_same_in_every_zone() {
    let db = TestDb::new();
    let (_, id) = claimed(&db, 1);
    let zone = |zone| {
        let mut conn = db.connect();
        conn.batch_execute(&format!("SET TIME ZONE '{zone}'"))
            .unwrap();
        conn
    };
    let (mut writer, mut reader) = (zone("Asia/Tokyo"), zone("America/St_Johns"));
    let instant = at(5) + TimeDelta::microseconds(123_456);
    reschedule(&mut writer, id[0], instant).unwrap();
    for conn in [&mut writer, &mut reader] {
        let record = get(conn, id[0]).unwrap();
        assert_eq!(record.entry.next_attempt_at, Some(instant));
    }
    let early = instant - TimeDelta::microseconds(1);
    assert_eq!(claim_due(&mut reader, early, 1, "w"), Ok(Vec::new()));
    assert_eq!(claim_due(&mut reader, instant, 1, "w").unwrap().len(), 1);
    assert_eq!(release_expired_claims(&mut writer, instant), Ok(Vec::new()));
}

// S5
#[test]
fn failing_twice_keeps_the_first_time_and_the_last_reason() {
    let db = TestDb::new();
    let (mut conn, id) = claimed(&db, 1);
    mark_failed(&mut conn, id[0], "x.one", None).unwrap();
    let first = get(&mut conn, id[0]).unwrap();
    mark_failed(&mut conn, id[0], "x.two", None).unwrap();
    let second = get(&mut conn, id[0]).unwrap();
    assert_eq!(second.last_failure.as_deref(), Some("x.two"));
    assert_eq!(second.entry.completed_at, first.entry.completed_at);
    assert_eq!(second.entry.status, OutboxStatus::Failed);
}

// S6
#[test]
fn a_remote_reference_is_filled_in_and_never_replaced() {
    let db = TestDb::new();
    let (mut conn, id) = claimed(&db, 2);
    mark_outcome_unknown(&mut conn, id[0], Some("r-1")).unwrap();
    mark_outcome_unknown(&mut conn, id[0], Some("r-2")).unwrap();
    mark_outcome_unknown(&mut conn, id[1], None).unwrap();
    mark_outcome_unknown(&mut conn, id[1], Some("r-3")).unwrap();
    for (id, expected) in id.iter().zip(["r-1", "r-3"]) {
        let record = get(&mut conn, *id).unwrap();
        assert_eq!(record.remote_ref.as_deref(), Some(expected));
        assert_eq!(record.entry.status, OutboxStatus::OutcomeUnknown);
        assert_eq!((record.claim, record.entry.completed_at), (None, None));
        assert!(record.unknown_since.is_some() && record.unknown_for.is_some());
    }
}

// S11
#[test]
fn rescheduling_keeps_what_is_known_about_the_row() {
    let db = TestDb::new();
    let (mut conn, id) = claimed(&db, 1);
    mark_outcome_unknown(&mut conn, id[0], Some("r")).unwrap();
    diesel::update(tf_outbox::table.find(id[0].0))
        .set((
            tf_outbox::attempt_count.eq(4),
            tf_outbox::last_failure.eq("x.y"),
        ))
        .execute(&mut conn)
        .unwrap();
    reschedule(&mut conn, id[0], at(5)).unwrap();
    let record = get(&mut conn, id[0]).unwrap();
    assert_eq!(record.entry.status, OutboxStatus::Pending);
    assert_eq!(record.entry.next_attempt_at, Some(at(5)));
    assert_eq!(record.entry.attempt_count, 4);
    assert_eq!(record.last_failure.as_deref(), Some("x.y"));
    assert_eq!(record.remote_ref.as_deref(), Some("r"));
    assert_eq!((record.claim, record.unknown_since), (None, None));
}

#[test]
fn each_transition_leaves_only_the_states_that_the_contract_names() {
    use OutboxStatus::{Completed, Dispatching, Failed, OutcomeUnknown, Pending};
    type Operation = fn(&mut PgConnection, OutboxId) -> Result<(), StoreError>;
    let operations: [(Operation, [Option<OutboxStatus>; 5]); 6] = [
        // from: pending, dispatching, outcome_unknown, completed, failed
        (
            mark_completed,
            [
                None,
                Some(Completed),
                Some(Completed),
                Some(Completed),
                None,
            ],
        ),
        (
            |conn, id| mark_failed(conn, id, "x", None),
            [None, Some(Failed), Some(Failed), None, Some(Failed)],
        ),
        (
            |conn, id| mark_failed(conn, id, "x", Some(at(9))),
            [Some(Pending), Some(Pending), Some(Pending), None, None],
        ),
        (
            |conn, id| reschedule(conn, id, at(9)),
            [Some(Pending), Some(Pending), Some(Pending), None, None],
        ),
        (
            |conn, id| mark_outcome_unknown(conn, id, None),
            [None, Some(OutcomeUnknown), Some(OutcomeUnknown), None, None],
        ),
        (redrive, [None, None, None, None, Some(Pending)]),
    ];
    let db = TestDb::new();
    let mut conn = db.connect();
    for (n, (operation, expected)) in operations.iter().enumerate() {
        for (from, to) in [Pending, Dispatching, OutcomeUnknown, Completed, Failed]
            .into_iter()
            .zip(expected)
        {
            let entry = OutboxEntry::new("a", format!("{n}-{from}"), &()).unwrap();
            let id = entry.outbox_id;
            enqueue(&mut conn, &entry).unwrap();
            if from != Pending {
                assert_eq!(
                    ids(&claim_due(&mut conn, Utc::now(), 9, "w").unwrap()),
                    [id]
                );
            }
            match from {
                OutcomeUnknown => mark_outcome_unknown(&mut conn, id, None).unwrap(),
                Completed => mark_completed(&mut conn, id).unwrap(),
                Failed => mark_failed(&mut conn, id, "x", None).unwrap(),
                _ => {}
            }
            let before = whole_row(&mut conn, id);
            match to {
                Some(to) => {
                    assert_eq!(operation(&mut conn, id), Ok(()), "{n} {from}");
                    assert_eq!(status(&mut conn, id), *to, "{n} {from}");
                }
                None => {
                    assert_eq!(
                        operation(&mut conn, id),
                        Err(StoreError::Conflict),
                        "{n} {from}"
                    );
                    assert_eq!(whole_row(&mut conn, id), before, "{n} {from}");
                }
            }
            diesel::delete(tf_outbox::table.find(id.0))
                .execute(&mut conn)
                .unwrap();
            assert_eq!(
                operation(&mut conn, id),
                Err(StoreError::NotFound),
                "{n} {from}"
            );
        }
    }
}

#[test]
fn redrive_gives_all_attempts_back() {
    let db = TestDb::new();
    let (mut conn, id) = claimed(&db, 1);
    mark_failed(&mut conn, id[0], "x", None).unwrap();
    redrive(&mut conn, id[0]).unwrap();
    let record = get(&mut conn, id[0]).unwrap();
    assert_eq!(record.entry.status, OutboxStatus::Pending);
    assert_eq!(
        (record.entry.attempt_count, record.entry.completed_at),
        (0, None)
    );
    assert_eq!(claim_due(&mut conn, Utc::now(), 5, "w").unwrap().len(), 1);
}

// L2
#[test]
fn only_claims_taken_strictly_before_are_released() {
    let db = TestDb::new();
    let mut conn = db.connect();
    let t = at(500);
    let batch = rows(5);
    for (entry, micros) in batch.iter().zip([-1, -1, 0, 1, 2]) {
        enqueue(&mut conn, entry).unwrap();
        let taken = t + TimeDelta::microseconds(micros);
        assert_eq!(claim_due(&mut conn, taken, 9, "w").unwrap().len(), 1);
    }
    diesel::update(tf_outbox::table.find(batch[4].outbox_id.0))
        .set(tf_outbox::claim_taken_at.eq(None::<DateTime<Utc>>))
        .execute(&mut conn)
        .unwrap();
    let mut expected = [batch[0].outbox_id, batch[1].outbox_id, batch[4].outbox_id];
    expected.sort_unstable();
    let untouched = [
        whole_row(&mut conn, batch[2].outbox_id),
        whole_row(&mut conn, batch[3].outbox_id),
    ];
    assert_eq!(release_expired_claims(&mut conn, t).unwrap(), expected);
    for id in expected {
        let record = get(&mut conn, id).unwrap();
        assert_eq!(record.entry.status, OutboxStatus::Pending);
        assert_eq!(
            (record.entry.attempt_count, record.entry.next_attempt_at),
            (1, None)
        );
        assert_eq!(record.claim, None);
    }
    assert_eq!(
        [
            whole_row(&mut conn, batch[2].outbox_id),
            whole_row(&mut conn, batch[3].outbox_id)
        ],
        untouched
    );
}

#[test]
fn the_store_commits_what_the_functions_do() {
    let db = TestDb::new();
    let outbox = PgOutbox::connect(db.url()).unwrap();
    let batch = rows(4);
    outbox.enqueue(&batch[0]).unwrap();
    outbox.enqueue_all(&batch[1..]).unwrap();
    assert!(matches!(
        outbox.enqueue_once(&batch[0]),
        Ok(Enqueued::Duplicate {
            same_payload: true,
            ..
        })
    ));
    assert_eq!(outbox.claim_due(Utc::now(), 4, "w").unwrap().len(), 4);
    outbox.mark_completed(batch[0].outbox_id).unwrap();
    outbox.mark_failed(batch[1].outbox_id, "x", None).unwrap();
    outbox
        .mark_outcome_unknown(batch[2].outbox_id, None)
        .unwrap();
    outbox.reschedule(batch[3].outbox_id, at(1)).unwrap();
    outbox.redrive(batch[1].outbox_id).unwrap();
    assert_eq!(outbox.release_expired_claims(Utc::now()).unwrap(), []);
    let mut other = db.connect();
    let expected = ["completed", "pending", "outcome_unknown", "pending"];
    for (entry, expected) in batch.iter().zip(expected) {
        assert_eq!(status(&mut other, entry.outbox_id).as_str(), expected);
        assert_eq!(
            outbox.get(entry.outbox_id).unwrap().entry.status.as_str(),
            expected
        );
    }
    assert_eq!(
        outbox.list_for_command(batch[0].command_id).unwrap().len(),
        1
    );
}

// N6
#[test]
fn a_nul_anywhere_is_refused_and_changes_nothing() {
    let db = TestDb::new();
    let (mut conn, id) = claimed(&db, 1);
    let before = whole_row(&mut conn, id[0]);
    let refused = |field| Err(StoreError::Serialization { field: Some(field) });
    assert_eq!(
        mark_failed(&mut conn, id[0], "a\0", None),
        refused("reason")
    );
    assert_eq!(
        mark_outcome_unknown(&mut conn, id[0], Some("a\0")),
        refused("remote_ref")
    );
    assert_eq!(
        claim_due(&mut conn, Utc::now(), 1, "\0").map(drop),
        refused("worker_id")
    );
    for (entry, field) in [
        (
            OutboxEntry::new("a", "k", &json!({"a": {"b": {"c": {"d": {"\0": 1}}}}})),
            "payload",
        ),
        (OutboxEntry::new("a", "k", &"\0"), "payload"),
        (OutboxEntry::new("a", "\0", &()), "idempotency_key"),
        (OutboxEntry::new("\0", "k", &()), "destination"),
    ] {
        assert_eq!(enqueue(&mut conn, &entry.unwrap()), refused(field));
    }
    assert_eq!(whole_row(&mut conn, id[0]), before);
    let n: i64 = tf_outbox::table.count().get_result(&mut conn).unwrap();
    assert_eq!(n, 1);
}

#[test]
fn the_limit_of_a_payload_can_be_set_and_holds_to_the_byte() {
    let db = TestDb::new();
    // Two bytes are the quotes.
    let of = |bytes: usize| OutboxEntry::new("a", format!("{bytes}"), &"x".repeat(bytes - 2));
    let limits = |bytes| EnqueueLimits::default().with_max_payload(bytes);
    let outbox = PgOutbox::builder(db.url())
        .with_limits(limits(2 << 20).unwrap())
        .build()
        .unwrap();
    let largest = of(2 << 20).unwrap();
    outbox.enqueue(&largest).unwrap();
    let stored = outbox.get(largest.outbox_id).unwrap().entry;
    assert_eq!(stored.payload, largest.payload);
    let larger = of((2 << 20) + 1).unwrap();
    let refused = [
        outbox.enqueue(&larger),
        outbox.enqueue_once(&larger).map(drop),
        outbox.enqueue_all(std::slice::from_ref(&larger)),
        // On a caller's connection the default holds, unless it says otherwise.
        enqueue(&mut db.connect(), &of((1 << 20) + 1).unwrap()),
        limits(100)
            .unwrap()
            .enqueue(&mut db.connect(), &of(101).unwrap()),
    ];
    for refused in refused {
        let error = refused.unwrap_err();
        assert!(error.is_invalid_record());
        assert!(error.to_string().ends_with("(payload)"), "{error}");
    }
    limits(100)
        .unwrap()
        .enqueue(&mut db.connect(), &of(100).unwrap())
        .unwrap();
    for senseless in [0, (255 << 20) + 1] {
        let error = limits(senseless).unwrap_err();
        assert!(error.to_string().ends_with("(max_payload)"), "{error}");
    }
}
