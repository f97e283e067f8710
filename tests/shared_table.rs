//! The async implementation's own store and ours on one table, at once.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::collections::HashMap;
use std::sync::{Barrier, Mutex};

use chrono::Utc;
use diesel::prelude::*;
use diesel_migrations::MigrationHarness;
use diesel_outbox::schema::tf_outbox;
use diesel_outbox::{OutboxEntry, OutboxWriter, PgOutbox, enqueue_all};
use serde_json::json;
use support::db::{TestDb, migrations};
use turnframe_store::outbox::OutboxWriter as _;
use turnframe_store_postgres::PgStores;
use uuid::Uuid;

const ROWS: usize = 5_000;

#[derive(Clone, Copy)]
enum First {
    Theirs,
    Ours,
}

#[test]
fn two_implementations_claim_and_settle_each_row_once_on_a_table_of_theirs() {
    share(First::Theirs);
}

#[test]
fn two_implementations_claim_and_settle_each_row_once_on_a_table_of_ours() {
    share(First::Ours);
}

fn share(first: First) {
    let db = TestDb::empty();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let migrate_ours = || {
        db.connect().run_pending_migrations(migrations()).unwrap();
    };
    if matches!(first, First::Ours) {
        migrate_ours();
    }
    let theirs = runtime.block_on(async {
        let stores = PgStores::connect(db.url()).await.unwrap();
        stores.migrate().await.unwrap();
        stores
    });
    if matches!(first, First::Theirs) {
        migrate_ours();
    }
    let entries: Vec<OutboxEntry> = (0..ROWS)
        .map(|i| OutboxEntry::new("a", format!("k{i}"), &json!({ "i": i })).unwrap())
        .collect();
    enqueue_all(&mut db.connect(), &entries).unwrap();

    let claims: Mutex<HashMap<Uuid, Vec<&'static str>>> = Mutex::default();
    let start = Barrier::new(8);
    let note = |claims: &Mutex<HashMap<Uuid, Vec<&'static str>>>, id, side| {
        claims.lock().unwrap().entry(id).or_default().push(side);
    };
    std::thread::scope(|scope| {
        for n in 0..4 {
            let (claims, start, db) = (&claims, &start, &db);
            scope.spawn(move || {
                let outbox = PgOutbox::connect(db.url()).unwrap();
                start.wait();
                loop {
                    let rows = outbox
                        .claim_due(Utc::now(), 20, &format!("ours-{n}"))
                        .unwrap();
                    if rows.is_empty() {
                        break;
                    }
                    for row in rows {
                        note(claims, row.outbox_id.0, "ours");
                        outbox.mark_completed(row.outbox_id).unwrap();
                    }
                }
            });
            let theirs = theirs.clone();
            let handle = runtime.handle().clone();
            scope.spawn(move || {
                start.wait();
                handle.block_on(async {
                    loop {
                        let worker = format!("theirs-{n}");
                        let rows = theirs.claim_due(Utc::now(), 20, &worker).await.unwrap();
                        if rows.is_empty() {
                            break;
                        }
                        for row in rows {
                            note(claims, *row.outbox_id.as_uuid(), "theirs");
                            theirs.mark_completed(&row.outbox_id).await.unwrap();
                        }
                    }
                });
            });
        }
    });

    let claims = claims.lock().unwrap();
    assert_eq!(claims.len(), ROWS);
    assert!(claims.values().all(|sides| sides.len() == 1));
    for side in ["ours", "theirs"] {
        assert!(
            claims.values().any(|sides| sides == &[side]),
            "{side} claimed none"
        );
    }
    let settled: i64 = tf_outbox::table
        .filter(tf_outbox::status.eq("completed"))
        .filter(tf_outbox::attempt_count.eq(1))
        .filter(tf_outbox::claim_worker_id.is_null())
        .count()
        .get_result(&mut db.connect())
        .unwrap();
    assert_eq!(settled, ROWS as i64);
    runtime.block_on(theirs.close());
}
