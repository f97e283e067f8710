//! The migration on every database it may meet, and back.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::collections::BTreeSet;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel_migrations::MigrationHarness;
use diesel_outbox::{Destination, Dispatched, Dispatcher};
use turnframe_core::command::IdempotencyKey;
use turnframe_core::event::{OutboxEntry, OutboxStatus};
use turnframe_core::ids::{CommandId, OutboxId};
use turnframe_store::outbox::OutboxWriter;
use turnframe_store_postgres::PgStores;

use support::catalog::{describe, strings};
use support::db::{TestDb, migrations};

/// The columns of the contract, which the async implementation has too.
const SHARED_COLUMNS: &str = "outbox_id, command_id, destination, payload, idempotency_key, \
     status, attempt_count, next_attempt_at, created_at, completed_at, claim_worker_id, \
     claim_taken_at, last_failure, remote_ref";

const THEIR_DUE_INDEX: &str = "index CREATE INDEX tf_outbox_due ON public.tf_outbox \
     USING btree (created_at, outbox_id) WHERE (status = 'pending'::text) t";

fn up(conn: &mut PgConnection) {
    conn.run_pending_migrations(migrations()).expect("up runs");
}

fn down(conn: &mut PgConnection) {
    conn.revert_all_migrations(migrations()).expect("down runs");
}

/// The migrations of `turnframe-store-postgres`, by its own migrator.
fn up_theirs(db: &TestDb) {
    with_their_store(db, async |store| store.migrate().await.unwrap());
}

fn with_their_store(db: &TestDb, work: impl AsyncFnOnce(&PgStores)) {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap()
        .block_on(async {
            let store = PgStores::connect(db.url()).await.unwrap();
            work(&store).await;
            store.close().await;
        });
}

/// 300 rows through their store, in all five statuses.
fn fill_by_theirs(db: &TestDb) {
    with_their_store(db, async |store| {
        for n in 0..300 {
            store.enqueue(their_entry(n)).await.unwrap();
        }
        let claimed = store
            .claim_due(chrono::Utc::now(), 200, "their worker")
            .await
            .unwrap();
        assert_eq!(claimed.len(), 200);
        for (n, entry) in claimed.iter().enumerate() {
            let id = &entry.outbox_id;
            match n % 5 {
                0 => store.mark_completed(id).await.unwrap(),
                1 => store
                    .mark_failed(id, "card.declined".into(), None)
                    .await
                    .unwrap(),
                2 => {
                    let later = chrono::Utc::now() + chrono::Duration::hours(1);
                    store
                        .mark_failed(id, "busy".into(), Some(later))
                        .await
                        .unwrap();
                }
                3 => store
                    .mark_outcome_unknown(id, Some("remote-1".into()))
                    .await
                    .unwrap(),
                _ => {}
            }
        }
    });
}

fn their_entry(n: usize) -> OutboxEntry {
    OutboxEntry {
        outbox_id: OutboxId::new(),
        command_id: CommandId::new(),
        destination: "airline".to_owned(),
        payload: serde_json::json!({ "n": n }),
        idempotency_key: IdempotencyKey::new(format!("k{n}")),
        status: OutboxStatus::Pending,
        attempt_count: 0,
        next_attempt_at: None,
        created_at: chrono::Utc::now(),
        completed_at: None,
    }
}

fn shared_rows(conn: &mut PgConnection) -> Vec<String> {
    let query = format!(
        "SELECT to_json(t)::text AS line
           FROM (SELECT {SHARED_COLUMNS} FROM tf_outbox ORDER BY outbox_id) t"
    );
    strings(conn, &query)
}

fn of_outbox(schema: &BTreeSet<String>, kind: &str) -> BTreeSet<String> {
    let start = format!("{kind} tf_outbox ");
    schema
        .iter()
        .filter(|line| line.starts_with(&start))
        .cloned()
        .collect()
}

#[test]
fn up_down_and_up_again_on_an_empty_database() {
    let db = TestDb::empty();
    let mut conn = db.connect();
    let empty = describe(&mut conn);
    up(&mut conn);
    let made = describe(&mut conn);
    assert_eq!(of_outbox(&made, "column").len(), 23);
    down(&mut conn);
    assert_eq!(describe(&mut conn), empty);
    up(&mut conn);
    assert_eq!(describe(&mut conn), made);
}

#[test]
fn a_filled_table_of_the_async_implementation_keeps_its_rows_and_constraints() {
    let db = TestDb::empty();
    up_theirs(&db);
    fill_by_theirs(&db);
    let mut conn = db.connect();
    let (theirs, rows) = (describe(&mut conn), shared_rows(&mut conn));
    assert_eq!(rows.len(), 300);
    assert!(theirs.contains(THEIR_DUE_INDEX));

    up(&mut conn);
    let both = describe(&mut conn);
    assert_eq!(shared_rows(&mut conn), rows);
    assert!(of_outbox(&both, "constraint").is_superset(&of_outbox(&theirs, "constraint")));
    assert!(of_outbox(&both, "column").is_superset(&of_outbox(&theirs, "column")));
    let lost: Vec<_> = theirs.difference(&both).collect();
    let (index, relation) = (lost[0], lost[1]);
    assert_eq!(index, THEIR_DUE_INDEX, "replaced under its name");
    assert!(
        relation.starts_with("relation tf_outbox r"),
        "tuned for vacuum"
    );
    assert_eq!(lost.len(), 2, "and nothing else: {lost:?}");

    down(&mut conn);
    assert_eq!(describe(&mut conn), theirs);
    assert_eq!(shared_rows(&mut conn), rows);

    up(&mut conn);
    assert_eq!(describe(&mut conn), both);
}

#[test]
fn both_orders_of_arrival_make_the_same_table_but_for_who_made_it() {
    let (ours_first, theirs_first) = (TestDb::empty(), TestDb::empty());
    up(&mut ours_first.connect());
    up_theirs(&ours_first);
    up_theirs(&theirs_first);
    up(&mut theirs_first.connect());
    let unsigned = |db: &TestDb| -> BTreeSet<String> {
        let lines = describe(&mut db.connect()).into_iter();
        lines
            .map(|line| line.replace(" Transactional outbox. Made by diesel-outbox.", ""))
            .collect()
    };
    assert_eq!(unsigned(&ours_first), unsigned(&theirs_first));
    fill_by_theirs(&ours_first);
}

#[test]
fn down_leaves_the_table_to_the_async_implementation_that_arrived_later() {
    let (db, theirs_alone) = (TestDb::empty(), TestDb::empty());
    let mut conn = db.connect();
    up(&mut conn);
    up_theirs(&db);
    fill_by_theirs(&db);
    let rows = shared_rows(&mut conn);

    down(&mut conn);
    up_theirs(&theirs_alone);
    assert_eq!(describe(&mut conn), describe(&mut theirs_alone.connect()));
    assert_eq!(shared_rows(&mut conn), rows);

    up(&mut conn);
    down(&mut conn);
    assert_eq!(
        shared_rows(&mut conn),
        rows,
        "we made the first table, not this one"
    );
}

#[test]
fn down_passes_over_a_table_that_somebody_dropped() {
    let db = TestDb::empty();
    let mut conn = db.connect();
    let empty = describe(&mut conn);
    up(&mut conn);
    conn.batch_execute("DROP TABLE tf_outbox").unwrap();
    down(&mut conn);
    assert_eq!(describe(&mut conn), empty);
}

/// The way that owners of a filled table are told to go, cut short: the index is
/// being made `CONCURRENTLY`, an open transaction holds it up, a timeout ends it.
fn leave_an_invalid_index(db: &TestDb) {
    db.execute("ALTER TABLE tf_outbox ADD COLUMN unknown_since timestamptz");
    let mut open = db.connect();
    open.batch_execute("BEGIN; UPDATE tf_outbox SET attempt_count = attempt_count")
        .unwrap();
    let mut maker = db.connect();
    maker
        .batch_execute("SET statement_timeout = '300ms'")
        .unwrap();
    let ended = maker.batch_execute(
        "CREATE INDEX CONCURRENTLY tf_outbox_unknown
             ON tf_outbox (destination, unknown_since, outbox_id)
             WHERE status = 'outcome_unknown'",
    );
    assert!(ended.is_err(), "the timeout did not fire");
    assert!(describe(&mut maker).iter().any(|line| line.ends_with(" f")));
}

#[test]
fn up_refuses_an_invalid_index_and_says_which() {
    let db = TestDb::empty();
    up_theirs(&db);
    fill_by_theirs(&db);
    leave_an_invalid_index(&db);
    let mut conn = db.connect();
    let before = describe(&mut conn);

    let refused = conn
        .run_pending_migrations(migrations())
        .unwrap_err()
        .to_string();
    assert!(
        refused.contains("invalid index (tf_outbox_unknown)"),
        "{refused}"
    );
    assert_eq!(describe(&mut conn), before);

    conn.batch_execute("DROP INDEX tf_outbox_unknown").unwrap();
    up(&mut conn);
}

/// Their table, with `prepare` done to it, does not migrate; the error names `what`
/// and nothing is changed.
fn refused(prepare: &str, what: &str) {
    let db = TestDb::empty();
    up_theirs(&db);
    let mut conn = db.connect();
    conn.batch_execute(prepare).unwrap();
    let before = describe(&mut conn);
    let refused = conn
        .run_pending_migrations(migrations())
        .unwrap_err()
        .to_string();
    assert!(refused.contains(what), "{prepare}: {refused}");
    assert_eq!(describe(&mut conn), before);
}

#[test]
fn up_refuses_an_index_of_another_definition_and_says_which() {
    let what = "index of another definition (tf_outbox_claims)";
    refused(
        "DROP INDEX tf_outbox_claims; CREATE INDEX tf_outbox_claims ON tf_outbox (claim_worker_id)",
        what,
    );
    // Like ours, and unique.
    refused(
        "DROP INDEX tf_outbox_claims; CREATE UNIQUE INDEX tf_outbox_claims
             ON tf_outbox (claim_taken_at) WHERE status = 'dispatching'",
        what,
    );
    // Neither ours nor the one that we replace.
    refused(
        "DROP INDEX tf_outbox_due; CREATE INDEX tf_outbox_due
             ON tf_outbox (created_at, coalesce(next_attempt_at, '-infinity'))",
        "index of another definition (tf_outbox_due)",
    );
}

#[test]
fn up_refuses_a_column_of_another_definition_and_says_which() {
    let refused = |column: &str, name: &str| {
        refused(
            &format!("ALTER TABLE tf_outbox ADD COLUMN {column}"),
            &format!("columns of another definition ({name})"),
        );
    };
    refused("headers text", "headers");
    // Without its collation it would sort otherwise than its index.
    refused("ordering_key text", "ordering_key");
    // An INSERT that does not know it would fail.
    refused("lapse_count integer NOT NULL", "lapse_count");
    // It is not told when the row was inserted.
    refused(
        "enqueued_at timestamptz NOT NULL DEFAULT now()",
        "enqueued_at",
    );
}

#[test]
fn what_the_owner_has_set_for_vacuum_and_storage_stays() {
    let db = TestDb::empty();
    up_theirs(&db);
    let mut conn = db.connect();
    conn.batch_execute(
        "ALTER TABLE tf_outbox SET (autovacuum_vacuum_threshold = 77, fillfactor = 90);
         ALTER INDEX tf_outbox_claims SET (fillfactor = 70)",
    )
    .unwrap();
    let options = "SELECT concat_ws(' ', relname, o.option_name, o.option_value) AS line
                     FROM pg_class, pg_options_to_table(reloptions) o
                    WHERE relname LIKE 'tf_outbox%' ORDER BY 1";
    let before = strings(&mut conn, options);
    up(&mut conn);
    assert_eq!(
        strings(&mut conn, options),
        [
            "tf_outbox autovacuum_analyze_scale_factor 0.02",
            "tf_outbox autovacuum_analyze_threshold 1000",
            "tf_outbox autovacuum_vacuum_scale_factor 0.01",
            "tf_outbox autovacuum_vacuum_threshold 77",
            "tf_outbox fillfactor 90",
            "tf_outbox_claims fillfactor 70",
        ]
    );
    down(&mut conn);
    assert_eq!(strings(&mut conn, options), before);
}

/// The SQL of `docs/filled-table.md`, statement by statement.
fn page_for_owners() -> Vec<String> {
    let page = include_str!("../docs/filled-table.md");
    let blocks = page.split("```sql\n").skip(1);
    let statements = blocks.flat_map(|block| {
        let (sql, _) = block.split_once("```").expect("a block has an end");
        sql.split_inclusive(";\n")
    });
    statements.map(|sql| sql.trim().to_owned()).collect()
}

#[test]
fn the_page_for_owners_of_a_filled_table_can_be_followed_to_the_letter() {
    let (db, without) = (TestDb::empty(), TestDb::empty());
    for db in [&db, &without] {
        up_theirs(db);
    }
    fill_by_theirs(&db);
    let mut conn = db.connect();
    let statements = page_for_owners();
    assert_eq!(statements.len(), 15);
    // A second round does no harm: somebody begins again after a failure.
    for statement in statements.iter().chain(&statements) {
        conn.batch_execute(statement)
            .unwrap_or_else(|error| panic!("{statement}: {error}"));
    }
    let indexes = "SELECT indexrelid::regclass || ' ' || indexrelid AS line FROM pg_index
                    WHERE indrelid = 'tf_outbox'::regclass AND indexrelid::regclass::text NOT LIKE '%key'
                       OR indexrelid::regclass::text = 'tf_outbox_key' ORDER BY 1";
    let before = strings(&mut conn, indexes);
    up(&mut conn);
    assert_eq!(strings(&mut conn, indexes), before, "made again");
    up(&mut without.connect());
    assert_eq!(describe(&mut conn), describe(&mut without.connect()));
}

/// Case M2.
#[test]
fn rows_inserted_without_our_columns_are_claimed_sent_and_settled() {
    let db = TestDb::new();
    let mut conn = db.connect();
    conn.batch_execute(&format!(
        "INSERT INTO tf_outbox ({SHARED_COLUMNS}) VALUES
             ('00000000-0000-0000-0000-000000000001', gen_random_uuid(), 'a', '{{\"i\":1}}', 'k1',
              'pending', 0, NULL, '2026-01-01T00:00:01Z', NULL, NULL, NULL, NULL, NULL);
         INSERT INTO tf_outbox (outbox_id, command_id, destination, payload, idempotency_key,
                                status, created_at)
         VALUES ('00000000-0000-0000-0000-000000000002', gen_random_uuid(), 'a', '{{\"i\":2}}',
                 'k2', 'pending', '2026-01-01T00:00:02Z')"
    ))
    .unwrap();
    let (sent, receiver) = std::sync::mpsc::channel();
    let mut dispatcher = Dispatcher::builder(db.url())
        .destination(Destination::idempotent(
            "a",
            move |entry: &diesel_outbox::OutboxEntry| {
                sent.send(entry.payload["i"].as_u64()).unwrap();
                Dispatched::completed()
            },
        ))
        .build()
        .unwrap();
    let swept = dispatcher.run_once().unwrap();
    assert_eq!((swept.claimed, swept.completed), (2, 2));
    let mut payloads: Vec<_> = receiver.try_iter().collect();
    payloads.sort_unstable();
    assert_eq!(payloads, [Some(1), Some(2)]);
    let settled = "SELECT outbox_id::text AS line FROM tf_outbox
                    WHERE status = 'completed' AND attempt_count = 1 AND completed_at IS NOT NULL
                      AND claim_worker_id IS NULL AND claim_taken_at IS NULL";
    assert_eq!(strings(&mut conn, settled).len(), 2);
}
