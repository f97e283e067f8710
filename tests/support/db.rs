//! A database for each test.
//!
//! It is cloned from a template that is migrated once for a server and a content
//! of `migrations/`, on the server of `DATABASE_URL` (which has to grant only
//! CREATEDB), else on a private one that this process starts and keeps.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::sql_query;
use diesel::sql_types::{BigInt, Text};
use diesel_migrations::{FileBasedMigrations, MigrationHarness};

use super::server::Server;

/// Two for this project; processes that make the template take turns by it.
const TEMPLATE_LOCK: i64 = 0x7466_6f75_7462_6f78;

/// The run that this process is part of, if somebody cleans up after it: then
/// every name begins with it, the template's too. Set by examples/private_server.
const RUN: &str = "OUTBOX_TEST_RUN";

/// What a killed run left behind is dropped by a later one.
const LEFTOVERS_AFTER: Duration = Duration::from_secs(24 * 3600);

/// A database of this test's own, dropped with it.
#[derive(Debug)]
pub struct TestDb {
    maintenance: String,
    name: String,
    url: String,
}

impl TestDb {
    /// With the schema, on the shared server.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Self::clone_template(maintenance_url())
    }

    /// Without any table, on the shared server.
    pub fn empty() -> Self {
        Self::create(maintenance_url(), "template0")
    }

    /// With the schema, on a server that the test owns.
    pub fn on(server: &Server) -> Self {
        Self::clone_template(&server.url("postgres"))
    }

    /// Without any table, on a server that the test owns.
    pub fn empty_on(server: &Server) -> Self {
        Self::create(&server.url("postgres"), "template0")
    }

    /// For clients of any driver.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The database's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A new connection to this database.
    pub fn connect(&self) -> PgConnection {
        connect(&self.url)
    }

    /// A new connection to the database from which this one was made, for what
    /// needs to be outside it: `ALTER DATABASE`, terminating its sessions.
    pub fn connect_outside(&self) -> PgConnection {
        connect(&self.maintenance)
    }

    /// Runs SQL, several statements too, on a connection of its own.
    pub fn execute(&self, sql: &str) {
        self.connect()
            .batch_execute(sql)
            .unwrap_or_else(|error| panic!("{sql}: {error}"));
    }

    fn clone_template(maintenance: &str) -> Self {
        Self::create(maintenance, &template(maintenance))
    }

    fn create(maintenance: &str, template: &str) -> Self {
        let name = fresh_name();
        connect(maintenance)
            .batch_execute(&format!("CREATE DATABASE {name} TEMPLATE {template}"))
            .unwrap_or_else(|error| panic!("creating a test's database: {error}"));
        Self {
            maintenance: maintenance.to_owned(),
            url: with_database(maintenance, &name),
            name,
        }
    }
}

impl Drop for TestDb {
    fn drop(&mut self) {
        // A test may have stopped its server, and then nothing is left to drop.
        if let Ok(mut conn) = PgConnection::establish(&self.maintenance) {
            let drop = format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.name);
            if let Err(error) = conn.batch_execute(&drop) {
                eprintln!("{drop}: {error}");
            }
        }
    }
}

/// The migrations of this project, as the diesel CLI finds them.
pub fn migrations() -> FileBasedMigrations {
    FileBasedMigrations::from_path(migrations_dir()).expect("migrations/ is readable")
}

fn migrations_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations")
}

/// Where databases are made and dropped: the one that `DATABASE_URL` names, or
/// `postgres` on the private server.
fn maintenance_url() -> &'static str {
    static PRIVATE: OnceLock<Server> = OnceLock::new();
    static URL: OnceLock<String> = OnceLock::new();
    URL.get_or_init(|| {
        let url = std::env::var("DATABASE_URL")
            .ok()
            .filter(|url| !url.is_empty());
        let url = url.unwrap_or_else(|| PRIVATE.get_or_init(Server::start).url("postgres"));
        drop_leftovers(&mut connect(&url));
        url
    })
}

fn connect(url: &str) -> PgConnection {
    PgConnection::establish(url).unwrap_or_else(|error| panic!("connecting for a test: {error}"))
}

/// The name of the migrated template, which is made if it is not there.
///
/// It is built under another name and renamed when it is complete, so that a
/// process killed half-way leaves nothing that looks finished.
fn template(maintenance: &str) -> String {
    let name = template_name();
    let mut conn = connect(maintenance);
    if exists(&mut conn, &name) {
        return name;
    }
    // Released at the end of the session, also by a panic.
    sql_query("SELECT pg_advisory_lock($1)")
        .bind::<BigInt, _>(TEMPLATE_LOCK)
        .execute(&mut conn)
        .expect("the template's lock");
    if exists(&mut conn, &name) {
        return name;
    }
    let unfinished = fresh_name();
    let run = |conn: &mut PgConnection, sql: String| {
        conn.batch_execute(&sql)
            .unwrap_or_else(|error| panic!("{sql}: {error}"));
    };
    run(
        &mut conn,
        format!("CREATE DATABASE {unfinished} TEMPLATE template0"),
    );
    connect(&with_database(maintenance, &unfinished))
        .run_pending_migrations(migrations())
        .unwrap_or_else(|error| panic!("migrating the template: {error}"));
    // A session in the template, autovacuum's too, would stand in the way of a
    // clone.
    run(
        &mut conn,
        format!("ALTER DATABASE {unfinished} ALLOW_CONNECTIONS false"),
    );
    run(
        &mut conn,
        format!("ALTER DATABASE {unfinished} RENAME TO {name}"),
    );
    name
}

fn exists(conn: &mut PgConnection, database: &str) -> bool {
    sql_query("SELECT FROM pg_database WHERE datname = $1")
        .bind::<Text, _>(database)
        .execute(conn)
        .expect("pg_database is readable")
        == 1
}

/// FNV-1a over names and contents: the same on every machine and toolchain.
fn fingerprint() -> u64 {
    let mut files: Vec<PathBuf> = fs::read_dir(migrations_dir())
        .expect("migrations/ is readable")
        .map(|entry| entry.expect("migrations/ is readable").path())
        .flat_map(|dir| [dir.join("up.sql"), dir.join("down.sql")])
        .collect();
    files.sort();
    let mut hash = 0xcbf2_9ce4_8422_2325;
    for file in files {
        let content = fs::read(&file).unwrap_or_default();
        let name = file.strip_prefix(migrations_dir()).unwrap_or(&file);
        for byte in name.as_os_str().as_encoded_bytes().iter().chain(&content) {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
    hash
}

/// Without a run there is one template for ever, and for all processes.
fn template_name() -> String {
    let content = fingerprint();
    match run() {
        Some(run) => format!("outbox_test_{run}_template_{content:016x}"),
        None => format!("outbox_template_{content:016x}"),
    }
}

/// The time is in the name, or at the head of the run's, so that a later run can
/// tell a leftover.
fn fresh_name() -> String {
    let run = run().unwrap_or_else(|| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        now.unwrap_or_default().as_secs().to_string()
    });
    let (unique, _) = uuid::Uuid::new_v4().as_u64_pair();
    format!("outbox_test_{run}_{unique:016x}")
}

fn run() -> Option<String> {
    std::env::var(RUN).ok().filter(|run| !run.is_empty())
}

fn drop_leftovers(conn: &mut PgConnection) {
    #[derive(QueryableByName)]
    struct Database {
        #[diesel(sql_type = Text)]
        name: String,
    }
    let leftovers = sql_query(
        "SELECT datname::text AS name FROM pg_database
          WHERE datname ~ '^outbox_test_[0-9]+_'
            AND split_part(datname, '_', 3)::bigint < extract(epoch FROM now())::bigint - $1
            AND NOT EXISTS (SELECT FROM pg_stat_activity a WHERE a.datname = pg_database.datname)",
    )
    .bind::<BigInt, _>(LEFTOVERS_AFTER.as_secs().cast_signed())
    .load::<Database>(conn)
    .expect("pg_database is readable");
    for Database { name } in leftovers {
        // Another process may be at it too.
        let _ = conn.batch_execute(&format!("DROP DATABASE IF EXISTS {name}"));
    }
}

/// The same server, another database.
///
/// Of libpq's two forms only the URL: the async implementation, beside which some
/// tests work, knows no other.
pub fn with_database(url: &str, database: &str) -> String {
    let (scheme, rest) = url
        .split_once("://")
        .expect("the tests want DATABASE_URL as a URL, postgres://…");
    let (address, query) = match rest.split_once('?') {
        Some((address, query)) => (address, format!("?{query}")),
        None => (rest, String::new()),
    };
    let authority = address.split('/').next().unwrap_or_default();
    format!("{scheme}://{authority}/{database}{query}")
}
