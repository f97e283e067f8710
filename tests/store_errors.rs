//! Every row of the table of errors, made to happen for real.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::collections::HashSet;
use std::error::Error;
use std::fmt::Debug;
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};
use diesel::connection::SimpleConnection;
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::r2d2::event::{CheckoutEvent, HandleEvent};
use diesel::r2d2::{ConnectionManager, Pool};
use diesel::sql_types::{BigInt, Text};
use diesel_outbox::schema::tf_outbox;
use diesel_outbox::{
    OutboxEntry, OutboxId, OutboxReader, OutboxStatus, OutboxWriter, PgOutbox, StoreError,
    claim_due, code, enqueue, enqueue_all, enqueue_once, get, mark_completed, mark_failed,
};
use serde_json::json;
use support::db::TestDb;
use support::logs::Logs;
use support::proxy::Proxy;
use support::server::{Server, StopMode};
use support::wait::{eventually, stretched};

const SOON: Duration = Duration::from_secs(10);

const OTHER: StoreError = StoreError::Other {
    code: code::DATABASE,
    field: None,
};

/// What the database itself refuses as illegal names no field.
const REFUSED: StoreError = StoreError::Other {
    code: code::INVALID_RECORD,
    field: None,
};

/// What a service's closure fails with.
#[derive(Debug)]
enum Failure {
    Outbox(StoreError),
    Database(diesel::result::Error),
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::Outbox(error)
    }
}

impl From<diesel::result::Error> for Failure {
    fn from(error: diesel::result::Error) -> Self {
        Self::Database(error)
    }
}

fn entry(key: &str) -> OutboxEntry {
    OutboxEntry::new("a", key, &json!({ "i": 1 })).unwrap()
}

fn pool(url: &str, size: u32) -> Pool<ConnectionManager<PgConnection>> {
    Pool::builder()
        .max_size(size)
        .min_idle(Some(0))
        .connection_timeout(stretched(Duration::from_secs(5)))
        .build_unchecked(ConnectionManager::new(url))
}

/// A store with one connection, which the next operation must be able to use.
fn alone(db: &TestDb) -> PgOutbox {
    PgOutbox::from_pool(pool(db.url(), 1))
}

fn count(db: &TestDb) -> i64 {
    tf_outbox::table
        .count()
        .get_result(&mut db.connect())
        .unwrap()
}

fn text(conn: &mut PgConnection, sql: &str) -> String {
    #[derive(QueryableByName)]
    struct Row {
        #[diesel(sql_type = Text)]
        text: String,
    }
    diesel::sql_query(sql).get_result::<Row>(conn).unwrap().text
}

fn number(conn: &mut PgConnection, sql: &str) -> i64 {
    #[derive(QueryableByName)]
    struct Row {
        #[diesel(sql_type = BigInt)]
        number: i64,
    }
    diesel::sql_query(sql)
        .get_result::<Row>(conn)
        .unwrap()
        .number
}

/// All rows with their versions.
fn table(db: &TestDb) -> String {
    text(
        &mut db.connect(),
        "SELECT coalesce(string_agg(t::text || ' ' || t.xmin::text, ';' ORDER BY outbox_id), '')
             AS text
           FROM tf_outbox t",
    )
}

/// A row in `dispatching`.
fn claimed(db: &TestDb, key: &str) -> OutboxId {
    let entry = entry(key);
    let conn = &mut db.connect();
    enqueue(conn, &entry).unwrap();
    assert_eq!(claim_due(conn, Utc::now(), 1, "w").unwrap().len(), 1);
    entry.outbox_id
}

/// A trigger on every row inserted or updated, before COMMIT or in it.
fn trap(db: &TestDb, at_commit: bool, body: &str) {
    let (kind, deferral) = if at_commit {
        ("CONSTRAINT TRIGGER", "DEFERRABLE INITIALLY DEFERRED")
    } else {
        ("TRIGGER", "")
    };
    db.execute(&format!(
        "CREATE FUNCTION trap() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN {body}; RETURN NULL; END $$;
         CREATE {kind} trap AFTER INSERT OR UPDATE ON tf_outbox {deferral}
             FOR EACH ROW EXECUTE FUNCTION trap()"
    ));
}

fn disarm(db: &TestDb) {
    db.execute("DROP TRIGGER trap ON tf_outbox; DROP FUNCTION trap()");
}

/// The session ends inside the trigger, never after it.
const TERMINATE: &str = "PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(60)";

/// The end of the message tells it from `READ COMMITTED`.
const COMMIT: &str = "COMMIT\0";

/// Terminates every other session of the database and says how many there were.
fn terminate_sessions(db: &TestDb) -> i64 {
    number(
        &mut db.connect_outside(),
        &format!(
            "SELECT count(pg_terminate_backend(pid, 10000)) AS number
               FROM pg_stat_activity WHERE datname = '{}'",
            db.name()
        ),
    )
}

// ------------------------------------------------------------ before the commit

// E2
#[test]
fn a_serialization_failure_at_commit_is_a_conflict_and_the_pool_goes_on() {
    let db = TestDb::new();
    let outbox = alone(&db);
    trap(&db, true, "RAISE EXCEPTION USING ERRCODE = '40001'");
    assert_eq!(outbox.enqueue(&entry("k1")), Err(StoreError::Conflict));
    assert_eq!(count(&db), 0);
    disarm(&db);
    assert_eq!(outbox.enqueue(&entry("k2")), Ok(()));
    assert_eq!(count(&db), 1);
}

// E3
#[test]
fn a_connection_lost_at_commit_is_a_timeout_and_before_it_unavailable() {
    for (at_commit, expected) in [
        (true, StoreError::Timeout),
        (false, StoreError::Unavailable),
    ] {
        let db = TestDb::new();
        let outbox = alone(&db);
        trap(&db, at_commit, TERMINATE);
        assert_eq!(outbox.enqueue(&entry("k1")), Err(expected));
        assert_eq!(outbox.enqueue_once(&entry("k1")), Err(expected));
        assert_eq!(outbox.enqueue_all(&[entry("k1")]), Err(expected));
        assert_eq!(count(&db), 0);
        disarm(&db);
        assert_eq!(outbox.enqueue(&entry("k2")), Ok(()));
        assert_eq!(count(&db), 1);
    }
}

// E3: why it must be a timeout
#[test]
fn a_commit_whose_answer_is_lost_is_a_timeout_and_has_happened() {
    let server = Server::start();
    let db = TestDb::on(&server);
    let proxy = Proxy::to(server.port());
    let outbox = PgOutbox::from_pool(pool(&proxy.url(db.url()), 1));

    proxy.cut_answer_to(COMMIT);
    assert_eq!(outbox.enqueue(&entry("k1")), Err(StoreError::Timeout));
    assert_eq!((proxy.fired(), count(&db)), (1, 1));

    proxy.cut_answer_to("INSERT");
    assert_eq!(outbox.enqueue(&entry("k2")), Err(StoreError::Unavailable));
    assert_eq!((proxy.fired(), count(&db)), (2, 1));

    assert_eq!(outbox.enqueue(&entry("k3")), Ok(()));
    assert_eq!(count(&db), 2);
}

#[test]
fn a_statement_of_its_own_is_its_own_commit() {
    let server = Server::start();
    let db = TestDb::on(&server);
    let proxy = Proxy::to(server.port());
    let connect = || PgConnection::establish(&proxy.url(db.url())).unwrap();

    // Prepared before, so that the cut answer is that of the INSERT itself.
    let mut conn = connect();
    enqueue(&mut conn, &entry("k1")).unwrap();
    proxy.cut_answer_to("k2");
    assert_eq!(enqueue(&mut conn, &entry("k2")), Err(StoreError::Timeout));
    assert_eq!((proxy.fired(), count(&db)), (1, 2));

    // Several rows are a transaction: here its COMMIT is what may be lost.
    let mut conn = connect();
    proxy.cut_answer_to(COMMIT);
    assert_eq!(
        enqueue_all(&mut conn, &[entry("k3"), entry("k4")]),
        Err(StoreError::Timeout)
    );
    assert_eq!((proxy.fired(), count(&db)), (2, 4));
    let mut conn = connect();
    proxy.cut_answer_to("INSERT");
    assert_eq!(
        enqueue_all(&mut conn, &[entry("k5"), entry("k6")]),
        Err(StoreError::Unavailable)
    );
    assert_eq!((proxy.fired(), count(&db)), (3, 4));

    // Inside the caller's transaction nothing is committed yet.
    let mut conn = connect();
    proxy.cut_answer_to("INSERT");
    let lost = conn.transaction::<(), Failure, _>(|conn| Ok(enqueue(conn, &entry("k7"))?));
    assert!(
        matches!(lost, Err(Failure::Outbox(StoreError::Unavailable))),
        "{lost:?}"
    );
    assert_eq!((proxy.fired(), count(&db)), (4, 4));
}

// E4
#[test]
fn dead_connections_of_a_pool_are_unavailable_at_most_once_each() {
    type Operation = fn(&PgOutbox, OutboxId) -> Result<(), StoreError>;
    let operations: [Operation; 3] = [
        |outbox, id| outbox.get(id).map(drop),
        |outbox, id| outbox.reschedule(id, Utc::now()),
        |outbox, _| outbox.list_for_command(entry("x").command_id).map(drop),
    ];
    for tested in [true, false] {
        for (n, operation) in operations.iter().enumerate() {
            let db = TestDb::new();
            let id = claimed(&db, "k");
            let pool = Pool::builder()
                .max_size(5)
                .test_on_check_out(tested)
                .build(ConnectionManager::new(db.url()))
                .unwrap();
            let outbox = PgOutbox::from_pool(pool.clone());
            assert_eq!(pool.state().idle_connections, 5);
            assert_eq!(terminate_sessions(&db), 5);
            let answers: Vec<_> = (0..6).map(|_| operation(&outbox, id)).collect();
            for answer in &answers {
                assert!(
                    matches!(answer, Ok(()) | Err(StoreError::Unavailable)),
                    "{tested} {n} {answers:?}"
                );
            }
            assert_eq!(answers[5], Ok(()), "{tested} {n} {answers:?}");
            // Where nothing tests them first, a dead one was really met.
            assert_eq!(answers[0].is_err(), !tested, "{tested} {n} {answers:?}");
        }
    }
}

#[test]
fn an_exhausted_pool_is_unavailable_when_its_timeout_is_over() {
    let db = TestDb::new();
    let id = claimed(&db, "k");
    let pool = Pool::builder()
        .max_size(1)
        .connection_timeout(Duration::from_millis(200))
        .build(ConnectionManager::new(db.url()))
        .unwrap();
    let outbox = PgOutbox::from_pool(pool.clone());
    let held = pool.get().unwrap();
    let begun = Instant::now();
    assert_eq!(outbox.get(id), Err(StoreError::Unavailable));
    assert_eq!(outbox.mark_completed(id), Err(StoreError::Unavailable));
    assert!(begun.elapsed() >= Duration::from_millis(400));
    assert!(begun.elapsed() < stretched(Duration::from_secs(4)));
    drop(held);
    assert_eq!(outbox.mark_completed(id), Ok(()));
}

#[test]
fn a_stopped_server_is_unavailable_until_it_is_back() {
    let server = Server::start();
    let db = TestDb::on(&server);
    let outbox = PgOutbox::builder(db.url())
        .with_acquire_timeout(Duration::from_millis(500))
        .build()
        .unwrap();
    outbox.enqueue(&entry("k1")).unwrap();
    let mut conn = db.connect();
    let caught = conn.transaction::<(), Failure, _>(|conn| {
        enqueue(conn, &entry("k2"))?;
        server.stop(StopMode::Fast);
        Ok(enqueue(conn, &entry("k3"))?)
    });
    assert!(
        matches!(caught, Err(Failure::Outbox(StoreError::Unavailable))),
        "{caught:?}"
    );
    assert_eq!(outbox.enqueue(&entry("k4")), Err(StoreError::Unavailable));
    assert_eq!(
        outbox.claim_due(Utc::now(), 1, "w"),
        Err(StoreError::Unavailable)
    );
    server.start_again();
    eventually(SOON, "the store is back", || {
        outbox.enqueue(&entry("k5")).ok()
    });
    assert_eq!(count(&db), 2);
}

// E7
#[test]
fn a_server_or_session_that_only_reads_is_unavailable() {
    let server = Server::start();
    let db = TestDb::on(&server);
    let id = claimed(&db, "k1");
    enqueue(&mut db.connect(), &entry("k2")).unwrap();
    let before = table(&db);
    let refused = StoreError::Unavailable;

    let writes = |conn: &mut PgConnection| {
        assert_eq!(enqueue(conn, &entry("k3")), Err(refused));
        assert_eq!(enqueue_once(conn, &entry("k3")), Err(refused));
        assert_eq!(enqueue_all(conn, &[entry("k3")]), Err(refused));
        assert_eq!(mark_completed(conn, id), Err(refused));
        assert_eq!(claim_due(conn, Utc::now(), 1, "w"), Err(refused));
    };
    let mut session = db.connect();
    session
        .batch_execute("SET default_transaction_read_only = on")
        .unwrap();
    writes(&mut session);
    // A session's default is no more than that: who asks to write may.
    session
        .build_transaction()
        .read_write()
        .run::<_, Failure, _>(|conn| {
            mark_completed(conn, id)?;
            Err::<(), _>(StoreError::NotFound.into())
        })
        .unwrap_err();

    server.become_standby();
    assert_eq!(
        text(
            &mut db.connect(),
            "SELECT pg_is_in_recovery()::text AS text"
        ),
        "true"
    );
    let mut session = db.connect();
    writes(&mut session);
    session
        .batch_execute("SET default_transaction_read_only = off")
        .unwrap();
    writes(&mut session);
    let asked = session
        .build_transaction()
        .read_write()
        .run::<_, Failure, _>(|conn| Ok(enqueue(conn, &entry("k3"))?));
    // Diesel's BEGIN is refused before the outbox is asked, with the words that
    // the store would know.
    let Err(Failure::Database(diesel::result::Error::DatabaseError(_, information))) = asked else {
        panic!("{asked:?}")
    };
    assert_eq!(
        information.message(),
        "cannot set transaction read-write mode during recovery"
    );
    let outbox = PgOutbox::connect(db.url()).unwrap();
    assert_eq!(outbox.enqueue(&entry("k3")), Err(refused));
    assert_eq!(outbox.claim_due(Utc::now(), 1, "w"), Err(refused));
    assert_eq!(outbox.mark_completed(id), Err(refused));
    assert_eq!(
        outbox.get(id).unwrap().entry.status,
        OutboxStatus::Dispatching
    );
    assert_eq!(table(&db), before);
}

// E8
#[test]
fn a_role_without_connections_left_is_unavailable() {
    let server = Server::start();
    let db = TestDb::on(&server);
    let id = claimed(&db, "k");
    db.execute(
        "CREATE ROLE app LOGIN PASSWORD 'app' CONNECTION LIMIT 0;
         GRANT SELECT ON tf_outbox TO app",
    );
    let url = format!(
        "postgres://app:app@127.0.0.1:{}/{}",
        server.port(),
        db.name()
    );
    let outbox = PgOutbox::builder(&url)
        .with_acquire_timeout(Duration::from_secs(2))
        .build()
        .unwrap();
    let begun = Instant::now();
    assert_eq!(outbox.get(id), Err(StoreError::Unavailable));
    assert!(begun.elapsed() < stretched(Duration::from_secs(3)));
    assert!(server.log().contains("too many connections for role"));
    db.execute("ALTER ROLE app CONNECTION LIMIT -1");
    eventually(SOON, "the role connects", || outbox.get(id).ok());
}

// ------------------------------------------------------------------ lost races

// E5
#[test]
fn a_real_deadlock_is_a_conflict_for_one_of_the_two() {
    let db = TestDb::new();
    let (first, second) = (claimed(&db, "k1"), claimed(&db, "k2"));
    let both_hold_one = Barrier::new(2);
    let run = |held, wanted| {
        let (db, both_hold_one) = (&db, &both_hold_one);
        move || {
            db.connect().transaction::<(), Failure, _>(|conn| {
                mark_completed(conn, held)?;
                both_hold_one.wait();
                Ok(mark_completed(conn, wanted)?)
            })
        }
    };
    let results = thread::scope(|scope| {
        [
            scope.spawn(run(first, second)),
            scope.spawn(run(second, first)),
        ]
        .map(|thread| thread.join().unwrap())
    });
    let lost: Vec<_> = results.iter().filter_map(|r| r.as_ref().err()).collect();
    assert!(
        matches!(lost[..], [Failure::Outbox(StoreError::Conflict)]),
        "{lost:?}"
    );
    eventually(SOON, "the server counts the deadlock", || {
        let sql = format!(
            "SELECT deadlocks AS number FROM pg_stat_database WHERE datname = '{}'",
            db.name()
        );
        (number(&mut db.connect(), &sql) == 1).then_some(())
    });
    for id in [first, second] {
        let row = get(&mut db.connect(), id).unwrap();
        assert_eq!(row.entry.status, OutboxStatus::Completed);
    }
}

#[test]
fn a_real_serialization_failure_is_a_conflict() {
    type Operation = fn(&mut PgConnection, OutboxId) -> Result<(), StoreError>;
    let operations: [Operation; 5] = [
        mark_completed,
        |conn, id| mark_failed(conn, id, "x", None),
        |conn, _| enqueue(conn, &entry("late")),
        |conn, _| enqueue_once(conn, &entry("late")).map(drop),
        |conn, _| enqueue_all(conn, &[entry("late")]),
    ];
    for isolation in ["REPEATABLE READ", "SERIALIZABLE"] {
        for (n, operation) in operations.iter().enumerate() {
            let db = TestDb::new();
            let id = claimed(&db, "k1");
            let mut conn = db.connect();
            let lost = conn.transaction::<(), Failure, _>(|conn| {
                conn.batch_execute(&format!("SET TRANSACTION ISOLATION LEVEL {isolation}"))?;
                get(conn, id)?; // the snapshot
                let other = &mut db.connect();
                mark_failed(other, id, "x.other", Some(Utc::now()))?;
                enqueue(other, &entry("late"))?;
                Ok(operation(conn, id)?)
            });
            assert!(
                matches!(lost, Err(Failure::Outbox(StoreError::Conflict))),
                "{isolation} {n} {lost:?}"
            );
            assert_eq!(count(&db), 2);
            let row = get(&mut db.connect(), id).unwrap();
            assert_eq!(row.last_failure.as_deref(), Some("x.other"));
        }
    }
}

// E5
#[test]
fn a_message_in_another_language_is_never_taken_for_what_it_is_not() {
    for (sqlstate, message, expected) in [
        ("40P01", "Verklemmung entdeckt", OTHER),
        ("57014", "storniere Anfrage wegen Zeitüberschreitung", OTHER),
        ("55P03", "verbinde nicht: deadlock detected", OTHER),
        ("23505", "doppelter Schlüsselwert", StoreError::Conflict),
        ("23503", "verletzt Fremdschlüssel", StoreError::Conflict),
        ("23P01", "verletzt Ausschluss", StoreError::Conflict),
        ("40001", "konnte Zugriff nicht ordnen", StoreError::Conflict),
        ("25006", "nur lesend", StoreError::Unavailable),
        ("23514", "verletzt Prüfung", REFUSED),
        ("23502", "ist leer", REFUSED),
        ("P0001", "irgend etwas", OTHER),
    ] {
        let db = TestDb::new();
        let id = claimed(&db, "k");
        let before = table(&db);
        trap(
            &db,
            false,
            &format!("RAISE SQLSTATE '{sqlstate}' USING MESSAGE = '{message}'"),
        );
        let outbox = alone(&db);
        assert_eq!(outbox.mark_completed(id), Err(expected), "{sqlstate}");
        assert_eq!(table(&db), before);
        disarm(&db);
        assert_eq!(outbox.mark_completed(id), Ok(()));
    }
}

// -------------------------------------------------------------------- timeouts

// E6
#[test]
fn a_statement_cancelled_by_a_timeout_is_a_timeout() {
    for setting in ["statement_timeout", "lock_timeout"] {
        let db = TestDb::new();
        let id = claimed(&db, "k");
        let before = table(&db);
        db.execute(&format!(
            "ALTER DATABASE {} SET {setting} = '200ms'",
            db.name()
        ));
        let outbox = alone(&db);
        let mut caller = db.connect();
        let mut holder = db.connect();
        holder.batch_execute("BEGIN").unwrap();
        tf_outbox::table
            .find(id.0)
            .select(tf_outbox::outbox_id)
            .for_update()
            .execute(&mut holder)
            .unwrap();
        assert_eq!(outbox.mark_completed(id), Err(StoreError::Timeout));
        assert_eq!(mark_completed(&mut caller, id), Err(StoreError::Timeout));
        assert_eq!(
            outbox.get(id).unwrap().entry.status,
            OutboxStatus::Dispatching
        );
        holder.batch_execute("ROLLBACK").unwrap();
        assert_eq!(table(&db), before);
        assert_eq!(mark_completed(&mut caller, id), Ok(()));
        assert_eq!(outbox.mark_completed(id), Ok(()));
    }
}

// --------------------------------------------------------------- illegal records

#[test]
fn constraints_of_the_host_are_refusals_or_conflicts_by_their_kind() {
    for (constraint, expected) in [
        (
            "ALTER TABLE tf_outbox ADD CHECK (destination <> 'a')",
            REFUSED,
        ),
        (
            "ALTER TABLE tf_outbox ADD COLUMN host int NOT NULL",
            REFUSED,
        ),
        (
            "CREATE TABLE host (id uuid PRIMARY KEY);
             ALTER TABLE tf_outbox ADD FOREIGN KEY (command_id) REFERENCES host",
            StoreError::Conflict,
        ),
        (
            "CREATE TABLE host (id int);
             INSERT INTO tf_outbox (outbox_id, command_id, destination, payload,
                                    idempotency_key, status, created_at)
                 VALUES (gen_random_uuid(), gen_random_uuid(), 'a', '1', 'k0', 'pending', now());
             ALTER TABLE tf_outbox ADD EXCLUDE USING btree (destination WITH =)",
            StoreError::Conflict,
        ),
    ] {
        let db = TestDb::new();
        db.execute(constraint);
        let before = table(&db);
        let outbox = alone(&db);
        assert_eq!(outbox.enqueue(&entry("k1")), Err(expected), "{constraint}");
        assert_eq!(table(&db), before);
        assert_eq!(outbox.list_for_command(entry("k1").command_id), Ok(vec![]));
    }
}

#[test]
fn an_error_of_the_database_aborts_the_callers_transaction() {
    let db = TestDb::new();
    db.execute("ALTER TABLE tf_outbox ADD CHECK (destination <> 'b')");
    let mut conn = db.connect();
    let failed = conn.transaction::<(), Failure, _>(|conn| {
        enqueue(conn, &entry("k1"))?;
        let forbidden = OutboxEntry::new("b", "k", &()).unwrap();
        assert_eq!(enqueue(conn, &forbidden), Err(REFUSED));
        Ok(enqueue(conn, &entry("k2"))?)
    });
    assert!(matches!(failed, Err(Failure::Outbox(OTHER))), "{failed:?}");
    assert_eq!(count(&db), 0);
    assert_eq!(enqueue(&mut conn, &entry("k3")), Ok(()));
}

// E9, Q6
#[test]
fn an_illegal_record_reaches_no_server_and_no_operation_draws_a_warning() {
    let server = Server::builder().setting("log_statement", "all").start();
    let db = TestDb::on(&server);
    let outbox = PgOutbox::connect(db.url()).unwrap();
    let inserts = || server.log().matches("INSERT INTO \"tf_outbox\"").count();
    let mut too_many = entry("k1");
    too_many.attempt_count = 2_147_483_648;
    let mut done = entry("k1");
    done.status = OutboxStatus::Completed;
    let mut conn = db.connect();
    for (illegal, field) in [(&too_many, "attempt_count"), (&done, "status")] {
        let expected = Err(StoreError::Other {
            code: "turnframe.store.invalid_record",
            field: Some(field),
        });
        assert_eq!(enqueue(&mut conn, illegal), expected);
        assert_eq!(outbox.enqueue(illegal), expected);
        assert_eq!(
            outbox.enqueue_all(&[entry("k1"), illegal.clone()]),
            expected
        );
    }
    assert_eq!((inserts(), count(&db)), (0, 0));

    let row = entry("k1");
    outbox.enqueue(&row).unwrap();
    eventually(SOON, "the log shows statements", || {
        (inserts() == 1).then_some(())
    });
    let id = row.outbox_id;
    let conflict = Err(StoreError::Conflict);
    assert_eq!(outbox.enqueue(&row), conflict);
    outbox.enqueue_once(&row).unwrap();
    assert_eq!(outbox.enqueue_all(&[entry("k2"), row.clone()]), conflict);
    outbox.enqueue_all(&[entry("k2"), entry("k3")]).unwrap();
    assert_eq!(outbox.mark_completed(id), conflict);
    assert_eq!(outbox.claim_due(Utc::now(), 1, "w").unwrap().len(), 1);
    outbox.mark_outcome_unknown(id, None).unwrap();
    outbox.mark_outcome_unknown(id, Some("r")).unwrap();
    outbox.reschedule(id, Utc::now()).unwrap();
    outbox.mark_failed(id, "x", Some(Utc::now())).unwrap();
    assert_eq!(outbox.mark_failed(id, "x", None), conflict);
    assert_eq!(outbox.claim_due(Utc::now(), 9, "w").unwrap().len(), 3);
    assert_eq!(
        outbox
            .release_expired_claims(Utc::now() + TimeDelta::hours(1))
            .unwrap()
            .len(),
        3
    );
    assert_eq!(outbox.claim_due(Utc::now(), 9, "w").unwrap().len(), 3);
    outbox.mark_failed(id, "x", None).unwrap();
    outbox.mark_failed(id, "x", None).unwrap();
    outbox.redrive(id).unwrap();
    assert_eq!(outbox.redrive(id), conflict);
    assert_eq!(
        outbox.mark_completed(OutboxId::new()),
        Err(StoreError::NotFound)
    );
    conn.transaction::<(), Failure, _>(|conn| {
        assert_eq!(enqueue_all(conn, &[entry("k4"), row.clone()]), conflict);
        Ok(enqueue_all(conn, &[entry("k4")])?)
    })
    .unwrap();
    trap(&db, true, "RAISE EXCEPTION USING ERRCODE = '40001'");
    assert_eq!(outbox.enqueue(&entry("k5")), conflict);
    disarm(&db);
    assert_eq!(count(&db), 4);

    let warnings = || server.log().matches("WARNING:").count();
    assert_eq!(warnings(), 0, "{}", server.log());
    conn.batch_execute("ROLLBACK").unwrap();
    eventually(SOON, "a warning shows in this log", || {
        (warnings() == 1).then_some(())
    });
}

// N1
#[test]
fn a_nul_leaves_the_pool_usable_and_no_row() {
    let db = TestDb::new();
    let outbox = alone(&db);
    for (entry, field) in [
        (OutboxEntry::new("a", "k", &json!({"x": "a\0b"})), "payload"),
        (OutboxEntry::new("a", "k\0", &()), "idempotency_key"),
        (OutboxEntry::new("a\0", "k", &()), "destination"),
    ] {
        let refused = Err(StoreError::Serialization { field: Some(field) });
        assert_eq!(outbox.enqueue(entry.as_ref().unwrap()), refused);
        assert_eq!(count(&db), 0);
        assert_eq!(outbox.get(OutboxId::new()), Err(StoreError::NotFound));
    }
    assert_eq!(outbox.enqueue(&entry("k")), Ok(()));
}

#[test]
fn instants_that_the_column_cannot_hold_are_refused_and_change_nothing() {
    let db = TestDb::new();
    let id = claimed(&db, "k");
    let before = table(&db);
    let outbox = alone(&db);
    let never = DateTime::<Utc>::MIN_UTC;
    let refused = |field| Err(StoreError::Serialization { field: Some(field) });
    assert_eq!(outbox.reschedule(id, never), refused("next_attempt_at"));
    assert_eq!(
        outbox.mark_failed(id, "x", Some(never)),
        refused("next_attempt_at")
    );
    assert_eq!(outbox.claim_due(never, 1, "w").map(drop), refused("at"));
    assert_eq!(
        outbox.release_expired_claims(never).map(drop),
        refused("claimed_before")
    );
    assert_eq!(table(&db), before);
    // The last that chrono knows is no trouble.
    assert_eq!(outbox.reschedule(id, DateTime::<Utc>::MAX_UTC), Ok(()));
    assert!(outbox.get(id).unwrap().entry.next_attempt_at > Some(Utc::now()));
}

#[test]
fn a_table_that_is_gone_is_another_failure_with_a_stable_code() {
    let db = TestDb::new();
    let id = claimed(&db, "k");
    let outbox = alone(&db);
    db.execute("ALTER TABLE tf_outbox RENAME TO elsewhere");
    assert_eq!(outbox.get(id), Err(OTHER));
    assert_eq!(outbox.enqueue(&entry("k2")), Err(OTHER));
    assert_eq!(outbox.claim_due(Utc::now(), 1, "w"), Err(OTHER));
    db.execute("ALTER TABLE elsewhere RENAME TO tf_outbox");
    assert_eq!(outbox.mark_completed(id), Ok(()));
}

#[test]
fn a_claimed_row_of_negative_attempts_is_failed_and_its_neighbour_returned() {
    let db = TestDb::new();
    let (bad, good) = (entry("bad"), entry("good"));
    let conn = &mut db.connect();
    enqueue_all(conn, &[bad.clone(), good.clone()]).unwrap();
    conn.batch_execute(
        "ALTER TABLE tf_outbox DROP CONSTRAINT tf_outbox_attempt_count_check;
         UPDATE tf_outbox SET attempt_count = -5 WHERE idempotency_key = 'bad'",
    )
    .unwrap();
    let claimed = claim_due(conn, Utc::now(), 5, "w").unwrap();
    assert_eq!(
        claimed.iter().map(|row| row.outbox_id).collect::<Vec<_>>(),
        [good.outbox_id]
    );
    let (status, reason): (String, Option<String>) = tf_outbox::table
        .find(bad.outbox_id.0)
        .select((tf_outbox::status, tf_outbox::last_failure))
        .get_result(conn)
        .unwrap();
    assert_eq!(
        (status.as_str(), reason.as_deref()),
        ("failed", Some("turnframe.dispatch.corrupt_row"))
    );
}

// --------------------------------------------------------------------- secrets

// X1
#[test]
fn no_error_and_no_log_line_holds_a_secret() {
    const CANARIES: [&str; 5] = [
        "SECRETKEY",
        "SECRETPAY",
        "SECRETDEST",
        "SECRETMSG",
        "hunter2",
    ];
    let logs = Logs::capture();
    let server = Server::start();
    let db = TestDb::on(&server);
    db.execute("CREATE ROLE app SUPERUSER LOGIN PASSWORD 'hunter2'");
    let with_password = |password: &str| {
        let url = format!(
            "postgres://app:{password}@127.0.0.1:{}/{}",
            server.port(),
            db.name()
        );
        let builder = PgOutbox::builder(&url)
            .with_max_size(1)
            .with_acquire_timeout(Duration::from_millis(500));
        let shown = format!("{builder:?} {:?}", builder.clone().build().unwrap());
        assert!(CANARIES.iter().all(|canary| !shown.contains(canary)));
        builder.build().unwrap()
    };
    let secret = |key: &str| {
        OutboxEntry::new(
            "SECRETDEST",
            format!("SECRETKEY{key}"),
            &json!({ "card": "SECRETPAY" }),
        )
        .unwrap()
    };
    let outbox = with_password("hunter2");
    let row = secret("1");
    let id = row.outbox_id;
    outbox.enqueue(&row).unwrap();

    let mut errors: Vec<(StoreError, &str)> = Vec::new();
    let mut provoke = |result: Result<(), StoreError>, shown| {
        errors.push((result.unwrap_err(), shown));
    };
    provoke(outbox.enqueue(&row), "outbox conflict");
    provoke(
        outbox.get(OutboxId::new()).map(drop),
        "outbox row not found",
    );
    let mut nul = secret("2");
    nul.payload = json!({ "SECRETPAY\0": 1 });
    provoke(outbox.enqueue(&nul), "value cannot be stored (payload)");
    let mut large = secret("2");
    large.destination = "SECRETDEST".repeat(100);
    provoke(
        outbox.enqueue(&large),
        "outbox failure turnframe.store.invalid_record (destination)",
    );
    db.execute("ALTER TABLE tf_outbox ADD CONSTRAINT c CHECK (idempotency_key !~ '3')");
    provoke(
        outbox.enqueue(&secret("3")),
        "outbox failure turnframe.store.invalid_record",
    );
    trap(
        &db,
        false,
        "RAISE EXCEPTION 'SECRETMSG % %', NEW.payload, NEW.idempotency_key",
    );
    provoke(
        outbox.enqueue(&secret("4")),
        "outbox failure turnframe.store.postgres.other",
    );
    disarm(&db);
    trap(
        &db,
        false,
        "SET LOCAL statement_timeout = '50ms'; RAISE WARNING 'SECRETMSG %', NEW.payload; \
         PERFORM pg_sleep(60)",
    );
    db.execute(&format!(
        "ALTER DATABASE {} SET statement_timeout = '200ms'",
        db.name()
    ));
    provoke(
        with_password("hunter2").enqueue(&secret("5")),
        "outbox operation timed out; it may have been written",
    );
    disarm(&db);
    trap(&db, false, TERMINATE);
    provoke(outbox.enqueue(&secret("6")), "outbox database unavailable");
    disarm(&db);
    provoke(
        with_password("hunter2-wrong").get(id).map(drop),
        "outbox database unavailable",
    );
    db.execute("UPDATE tf_outbox SET status = 'SECRETMSG'");
    provoke(outbox.get(id).map(drop), "stored value is corrupt (status)");
    db.execute(
        "UPDATE tf_outbox SET status = 'pending', created_at = 'infinity', next_attempt_at = NULL",
    );
    assert_eq!(outbox.claim_due(Utc::now(), 1, "w"), Ok(vec![]));
    provoke(
        outbox.get(id).map(drop),
        "stored value is corrupt (created_at)",
    );

    for (error, shown) in errors {
        assert_eq!(error.to_string(), shown);
        assert!(error.source().is_none());
        let debug = format!("{error:?} {error:#?}");
        for canary in CANARIES {
            assert!(!debug.contains(canary), "{debug}");
        }
    }
    // The faults fired, and what they said was logged by the crate: nothing.
    for fired in ["SECRETMSG", "SECRETKEY", "SECRETPAY", "SECRETDEST"] {
        assert!(server.log().contains(fired), "{fired}");
    }
    assert!(server.log().contains("password authentication failed"));
    assert!(!logs.our_warnings().is_empty());
    for canary in CANARIES {
        logs.assert_without(canary);
    }
}

// ------------------------------------------------------------------------ pool

// Q1
#[test]
fn a_panic_inside_a_transaction_gives_the_connection_up() {
    let db = TestDb::new();
    let pool = pool(db.url(), 1);
    let outbox = PgOutbox::from_pool(pool.clone());
    let (lost, kept) = (entry("k1"), entry("k2"));
    let panicked = thread::scope(|scope| {
        scope
            .spawn(|| {
                pool.get().unwrap().transaction::<(), Failure, _>(|conn| {
                    enqueue(conn, &lost)?;
                    get(conn, lost.outbox_id)?;
                    panic!("the service's own fault")
                })
            })
            .join()
            .is_err()
    });
    assert!(panicked);
    let begun = Instant::now();
    assert_eq!(outbox.enqueue(&kept), Ok(()));
    assert!(begun.elapsed() < stretched(Duration::from_secs(5)));
    assert_eq!(outbox.get(lost.outbox_id), Err(StoreError::NotFound));
    assert_eq!(outbox.get(kept.outbox_id).unwrap().entry, kept);
    eventually(SOON, "no session is left in its transaction", || {
        let sql = format!(
            "SELECT count(*) AS number FROM pg_stat_activity
              WHERE datname = '{}' AND state LIKE 'idle in transaction%'",
            db.name()
        );
        (number(&mut db.connect(), &sql) == 0).then_some(())
    });
}

/// The connections that a pool handed out.
#[derive(Debug, Clone, Default)]
struct HandedOut(Arc<Mutex<Vec<u64>>>);

impl HandleEvent for HandedOut {
    fn handle_checkout(&self, event: CheckoutEvent) {
        self.0.lock().unwrap().push(event.connection_id());
    }
}

// Q2
#[test]
fn refused_operations_cost_no_connection() {
    let db = TestDb::new();
    let handed_out = HandedOut::default();
    let pool = Pool::builder()
        .max_size(2)
        .event_handler(Box::new(handed_out.clone()))
        .build(ConnectionManager::new(db.url()))
        .unwrap();
    let outbox = PgOutbox::from_pool(pool);
    let taken = entry("taken");
    outbox.enqueue(&taken).unwrap();
    let refused: usize = thread::scope(|scope| {
        let work = |worker: usize| {
            let (outbox, taken) = (&outbox, &taken);
            move || {
                (0..500)
                    .filter(|i| match i % 10 {
                        0 => outbox.enqueue(taken) == Err(StoreError::Conflict),
                        _ => outbox.enqueue(&entry(&format!("{worker}-{i}"))) != Ok(()),
                    })
                    .count()
            }
        };
        [scope.spawn(work(0)), scope.spawn(work(1))]
            .map(|thread| thread.join().unwrap())
            .iter()
            .sum()
    });
    assert_eq!(refused, 100);
    assert_eq!(count(&db), 901);
    let handed_out = handed_out.0.lock().unwrap();
    assert_eq!(handed_out.len(), 1_001);
    assert!(handed_out.iter().collect::<HashSet<_>>().len() <= 2);
}

// Q3
#[test]
fn enqueuing_on_the_callers_connection_needs_no_other() {
    let db = TestDb::new();
    let pool = pool(db.url(), 1);
    let mut conn = pool.get().unwrap();
    let row = entry("k");
    let begun = Instant::now();
    let rolled_back = conn.transaction::<(), Failure, _>(|conn| {
        enqueue(conn, &row)?;
        get(conn, row.outbox_id)?;
        Err(diesel::result::Error::RollbackTransaction.into())
    });
    assert!(matches!(
        rolled_back,
        Err(Failure::Database(
            diesel::result::Error::RollbackTransaction
        ))
    ));
    assert!(begun.elapsed() < stretched(Duration::from_secs(1)));
    assert_eq!(pool.state().connections, 1);
    assert_eq!(count(&db), 0);
}
