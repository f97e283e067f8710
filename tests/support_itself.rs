//! The support keeps its own promises.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::path::{Path, PathBuf};
use std::time::Duration;

use diesel::prelude::*;
use diesel::sql_query;

use support::db::{TestDb, with_database};
use support::process::{self, Child};
use support::server::{Server, StopMode};
use support::wait::eventually;

const SOON: Duration = Duration::from_secs(20);

fn runs(pid: i32) -> bool {
    // A zombie, where nobody reaps, has no working directory any more.
    std::fs::read_link(format!("/proc/{pid}/cwd")).is_ok()
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
    });
}

#[test]
fn processes_that_race_for_the_template_all_get_a_database() {
    let server = Server::start();
    let url = server.url("postgres");
    let mut makers: Vec<_> = (0..4)
        .map(|_| Child::spawn("maker_of_a_database", &[("DATABASE_URL", &url)]))
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
fn a_database_is_named_in_either_form_of_a_connection_string() {
    for (given, expected) in [
        ("postgres://u:p@h:1/a", "postgres://u:p@h:1/b"),
        ("postgres://h", "postgres://h/b"),
        (
            "postgres:///a?host=/tmp&port=1",
            "postgres:///b?host=/tmp&port=1",
        ),
        ("host=h dbname=a", "host=h dbname=a dbname=b"),
    ] {
        assert_eq!(with_database(given, "b"), expected);
    }
}
