//! Services that migrate when they start, several at once.
#![cfg(feature = "migrations")]
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel_outbox::migrations::{self, MigrationError};

use support::catalog::{describe, strings};
use support::db::TestDb;
use support::process::{self, Child};

const SOON: Duration = Duration::from_secs(30);

const APPLIED: &str = "SELECT version::text AS line FROM __diesel_schema_migrations ORDER BY 1";

/// Held by the test until every process is connected.
const TAKE_THE_BARRIER: &str = "SELECT pg_advisory_lock(1)";
const PASS_THE_BARRIER: &str = "SELECT pg_advisory_lock_shared(1), pg_advisory_unlock_shared(1)";

#[test]
fn migrating_service() {
    process::role("migrating_service", || {
        let mut conn = PgConnection::establish(&std::env::var("SERVICE_DB").unwrap()).unwrap();
        process::say("connected");
        conn.batch_execute(PASS_THE_BARRIER).unwrap();
        let applied = migrations::run(&mut conn).unwrap();
        process::say(&format!("applied {}", applied.len()));
    });
}

/// Case M1.
#[test]
fn five_services_that_start_together_migrate_once() {
    let db = TestDb::empty();
    let mut conn = db.connect();
    conn.batch_execute(TAKE_THE_BARRIER).unwrap();
    let mut services: Vec<_> = (0..5)
        .map(|_| Child::spawn("migrating_service", &[("SERVICE_DB", db.url())]))
        .collect();
    for service in &services {
        service.wait_line("connected", SOON);
    }
    conn.batch_execute("SELECT pg_advisory_unlock_all()")
        .unwrap();

    let mut applied: Vec<String> = Vec::new();
    for service in &mut services {
        applied.push(service.wait_line("applied ", SOON));
        assert!(service.wait_exit(SOON).success());
    }
    applied.sort_unstable();
    let recorded = strings(&mut conn, APPLIED);
    let all = recorded.len().to_string();
    assert_eq!(applied, ["0", "0", "0", "0", all.as_str()]);

    let schema = describe(&mut conn);
    assert!(migrations::run(&mut conn).unwrap().is_empty());
    assert_eq!(describe(&mut conn), schema);
    assert_eq!(strings(&mut conn, APPLIED), recorded);
}

#[test]
fn the_lock_is_released_by_success_and_by_failure() {
    let db = TestDb::empty();
    // What no migration of ours expects: a view under the table's name.
    db.execute("CREATE VIEW tf_outbox AS SELECT 1 AS one");
    let mut conn = db.connect();
    let held = "SELECT pid::text AS line FROM pg_locks
                 WHERE locktype = 'advisory' AND pid = pg_backend_pid()";

    let failed = migrations::run(&mut conn).unwrap_err();
    assert!(matches!(failed, MigrationError::Failed(_)), "{failed}");
    assert!(strings(&mut conn, held).is_empty());

    db.execute("DROP VIEW tf_outbox");
    assert!(!migrations::run(&mut conn).unwrap().is_empty());
    assert!(strings(&mut conn, held).is_empty());
}

#[test]
fn a_wait_for_the_lock_ends_by_the_sessions_timeout_and_changes_nothing() {
    let db = TestDb::empty();
    let mut other = db.connect();
    other
        .batch_execute("SELECT pg_advisory_lock(x'74666f75746d6967'::bigint)")
        .unwrap();
    let mut conn = db.connect();
    conn.batch_execute("SET lock_timeout = '100ms'").unwrap();
    let failed = migrations::run(&mut conn).unwrap_err();
    assert!(matches!(failed, MigrationError::Lock(_)), "{failed}");
    assert!(describe(&mut conn).is_empty());
}

#[test]
fn the_embedded_files_are_those_of_the_folder() {
    let (embedded, folder) = (TestDb::empty(), TestDb::new());
    let mut conn = embedded.connect();
    migrations::run(&mut conn).unwrap();
    assert_eq!(describe(&mut conn), describe(&mut folder.connect()));
}
