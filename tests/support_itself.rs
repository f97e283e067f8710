//! The support keeps its own promises.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::path::{Path, PathBuf};
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::sql_query;

use support::db::{TestDb, with_database};
use support::logs::Logs;
use support::process::{self, Child};
use support::proxy::Proxy;
use support::server::{Server, StopMode};
use support::wait::eventually;

const SOON: Duration = Duration::from_secs(20);

fn runs(pid: i32) -> bool {
    // A zombie, where nobody reaps, has no command line any more.
    std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty())
}

fn gone(pid: i32, dir: &Path) -> Option<()> {
    (!runs(pid) && !dir.exists()).then_some(())
}

#[test]
fn owner_of_a_server() {
    process::role("owner_of_a_server", || {
        let server = Server::start();
        let pid = server.pid().unwrap();
        process::say(&format!("server {pid} {}", server.dir().display()));
        if std::env::var("PANICS").is_ok() {
            // Without a message on the terminal.
            std::panic::resume_unwind(Box::new("on purpose"));
        }
        loop {
            std::thread::park();
        }
    });
}

fn said_server(owner: &Child) -> (i32, PathBuf) {
    let line = owner.wait_line("server ", Duration::from_secs(60));
    let (pid, dir) = line.split_once(' ').unwrap();
    (pid.parse().unwrap(), dir.into())
}

#[test]
fn a_server_ends_with_its_killed_owner() {
    let mut owner = Child::spawn("owner_of_a_server", &[]);
    let (pid, dir) = said_server(&owner);
    assert!(runs(pid) && dir.exists());
    owner.sigkill();
    eventually(SOON, "server and directory gone", || gone(pid, &dir));
}

#[test]
fn a_server_ends_with_its_panicking_owner() {
    let mut owner = Child::spawn("owner_of_a_server", &[("PANICS", "1")]);
    let (pid, dir) = said_server(&owner);
    assert!(!owner.wait_exit(SOON).success());
    eventually(SOON, "server and directory gone", || gone(pid, &dir));
}

#[test]
fn a_frozen_server_ends_too() {
    let server = Server::start();
    let (pid, dir) = (server.pid().unwrap(), server.dir().to_owned());
    server.sigstop();
    drop(server);
    assert_eq!(gone(pid, &dir), Some(()));
}

#[test]
fn a_server_restarts_with_its_data_and_turns_into_a_standby() {
    let server = Server::builder()
        .setting("application_name", "it's")
        .start();
    let db = TestDb::on(&server);
    db.execute("CREATE TABLE kept (x int)");
    let pid = server.pid();
    server.restart(StopMode::Immediate);
    assert_ne!(server.pid(), pid);
    db.execute("INSERT INTO kept VALUES (1)");

    server.reload("default_transaction_read_only", "on");
    let refused = sql_query("DELETE FROM kept").execute(&mut db.connect());
    assert!(refused.unwrap_err().to_string().contains("read-only"));
    server.reload("default_transaction_read_only", "off");

    server.become_standby();
    let refused = sql_query("DELETE FROM kept").execute(&mut db.connect());
    assert!(refused.unwrap_err().to_string().contains("read-only"));
    server.promote();
    db.execute("DELETE FROM kept");
}

#[test]
fn maker_of_a_database() {
    process::role("maker_of_a_database", || {
        let db = TestDb::new();
        db.execute("SELECT claim_seq FROM tf_outbox");
        process::say(&format!("made {}", db.name()));
        if std::env::var("LEAVES_IT").is_ok() {
            std::mem::forget(db);
        }
    });
}

#[test]
fn processes_that_race_for_the_template_all_get_a_database() {
    let server = Server::start();
    let url = server.url("postgres");
    let mut makers: Vec<_> = (0..4)
        .map(|_| {
            let environment = [("DATABASE_URL", url.as_str()), ("OUTBOX_TEST_RUN", "")];
            Child::spawn("maker_of_a_database", &environment)
        })
        .collect();
    for maker in &mut makers {
        maker.wait_line("made ", Duration::from_secs(60));
        assert!(maker.wait_exit(SOON).success());
    }
    let mut conn = PgConnection::establish(&url).unwrap();
    let count = |conn: &mut PgConnection, pattern: &str| {
        sql_query(format!(
            "SELECT FROM pg_database WHERE datname LIKE '{pattern}'"
        ))
        .execute(conn)
        .unwrap()
    };
    assert_eq!(count(&mut conn, "outbox_template_%"), 1);
    assert_eq!(
        count(&mut conn, "outbox_test_%"),
        0,
        "nothing is left behind"
    );
}

#[test]
fn a_run_on_a_given_server_leaves_no_database_there() {
    let server = Server::start();
    let url = server.url("postgres");
    let this = std::env::current_exe().unwrap();
    let mut run = Child::spawn_example(
        "private_server",
        &[
            this.to_str().unwrap(),
            "--exact",
            "maker_of_a_database",
            "--nocapture",
        ],
        &[
            ("DATABASE_URL", &url),
            ("OUTBOX_TEST_ROLE", "maker_of_a_database"),
            ("LEAVES_IT", "1"),
        ],
    );
    run.wait_line("made outbox_test_", SOON);
    assert!(run.wait_exit(SOON).success());
    let left = sql_query("SELECT FROM pg_database WHERE datname LIKE 'outbox%'")
        .execute(&mut PgConnection::establish(&url).unwrap());
    assert_eq!(left, Ok(0));
}

#[test]
fn a_database_is_named_in_any_url_of_its_server() {
    for (given, expected) in [
        ("postgres://u:p@h:1/a", "postgres://u:p@h:1/b"),
        ("postgres://h", "postgres://h/b"),
        (
            "postgres:///a?host=/tmp&port=1",
            "postgres:///b?host=/tmp&port=1",
        ),
    ] {
        assert_eq!(with_database(given, "b"), expected);
    }
}

/// A database behind a proxy, and the connection through it.
fn behind_a_proxy() -> (Server, TestDb, Proxy, PgConnection) {
    let server = Server::start();
    let db = TestDb::empty_on(&server);
    db.execute("CREATE TABLE kept (x int)");
    let proxy = Proxy::to(server.port());
    let conn = PgConnection::establish(&proxy.url(db.url())).unwrap();
    (server, db, proxy, conn)
}

#[test]
fn the_answer_to_a_commit_is_cut_and_the_commit_has_happened() {
    let (_server, db, proxy, mut conn) = behind_a_proxy();
    proxy.cut_answer_to("COMMIT");
    let result = conn.transaction::<(), diesel::result::Error, _>(|conn| {
        sql_query("INSERT INTO kept VALUES (1)").execute(conn)?;
        Ok(())
    });
    assert!(result.is_err());
    assert_eq!(proxy.fired(), 1);
    let kept = sql_query("SELECT FROM kept").execute(&mut db.connect());
    assert_eq!(kept, Ok(1));
}

#[test]
fn a_network_that_refuses_swallows_and_cuts() {
    let (_server, db, proxy, mut conn) = behind_a_proxy();
    let url = proxy.url(db.url());

    proxy.blackhole();
    let waiting = std::thread::spawn(move || conn.batch_execute("SELECT 1"));
    eventually(SOON, "a swallowed request", || {
        (proxy.fired() > 0).then_some(())
    });
    assert!(!waiting.is_finished());
    assert_eq!(proxy.cut(), 1);
    assert!(waiting.join().unwrap().is_err());

    proxy.refuse();
    let before = proxy.fired();
    assert!(PgConnection::establish(&url).is_err());
    assert!(proxy.fired() > before);

    proxy.heal();
    assert!(PgConnection::establish(&url).is_ok());
}

#[test]
fn lines_of_every_thread_are_captured_with_their_fields() {
    let logs = Logs::capture();
    std::thread::spawn(|| tracing::warn!(target: "diesel_outbox::x", key = "CANARY", "lost"))
        .join()
        .unwrap();
    tracing::warn!(target: "elsewhere", "not ours");
    let ours = logs.our_warnings();
    assert_eq!(ours.len(), 1);
    assert_eq!(logs.busiest_second(), 1);
    assert!(ours[0].text.contains("CANARY"));
    assert!(std::panic::catch_unwind(|| logs.assert_without("CANARY")).is_err());
    logs.assert_without("another canary");
}

/// Each failure that `docs/dispatcher.md` speaks of is a test.
#[test]
fn the_tests_that_the_page_names_are_there() {
    let page = include_str!("../docs/dispatcher.md");
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let named: Vec<(&str, &str)> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.strip_suffix("` |"))
        .filter_map(|line| line.rsplit_once('`')?.1.split_once("::"))
        .collect();
    assert!(named.len() > 30, "{}", named.len());
    for (file, test) in named {
        let source = std::fs::read_to_string(root.join(format!("{file}.rs"))).unwrap();
        assert!(source.contains(&format!("#[test]\nfn {test}()")), "{test}");
    }
}
