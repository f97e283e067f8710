//! The demo's own database: on the server of `DATABASE_URL`, else on a private
//! one that is removed afterwards.

use diesel::connection::SimpleConnection;
use diesel::prelude::*;

use crate::Outcome;
use crate::server::Server;

/// The service's own table, beside the outbox.
const ORDERS: &str = "CREATE TABLE orders (
    id uuid PRIMARY KEY,
    key text NOT NULL UNIQUE,
    placed_at timestamptz NOT NULL DEFAULT now()
)";

pub(crate) struct Database {
    maintenance: String,
    name: String,
    pub(crate) url: String,
    /// Stops with this value.
    server: Option<Server>,
}

impl Database {
    /// A fresh database with the outbox's migrations and the service's table.
    pub(crate) fn create() -> Outcome<Self> {
        let given = std::env::var("DATABASE_URL").unwrap_or_default();
        let (maintenance, server) = if given.is_empty() {
            println!("Starting a private PostgreSQL (DATABASE_URL is not set) …");
            let server = Server::builder().durable().launch()?;
            (server.url("postgres"), Some(server))
        } else {
            println!("Using the server of DATABASE_URL …");
            (given, None)
        };
        let name = format!("outbox_demo_{}", uuid::Uuid::new_v4().simple());
        // Whose text may quote the URL, and with it a password.
        let outside = |_| "cannot connect to the database server";
        PgConnection::establish(&maintenance)
            .map_err(outside)?
            .batch_execute(&format!("CREATE DATABASE {name}"))?;
        let database = Self {
            url: with_database(&maintenance, &name),
            maintenance,
            name,
            server,
        };
        let mut conn = database.connect()?;
        diesel_outbox::migrations::run(&mut conn)?;
        conn.batch_execute(ORDERS)?;
        Ok(database)
    }

    pub(crate) fn connect(&self) -> Outcome<PgConnection> {
        Ok(PgConnection::establish(&self.url)
            .map_err(|_| "cannot connect to the demo's database")?)
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        if self.server.is_none()
            && let Ok(mut conn) = PgConnection::establish(&self.maintenance)
        {
            let _ = conn.batch_execute(&format!("DROP DATABASE {} WITH (FORCE)", self.name));
        }
    }
}

/// The same server, another database, for both forms of a connection string.
fn with_database(url: &str, name: &str) -> String {
    let Some(authority) = url.find("://").map(|i| i + 3) else {
        return format!("{url} dbname={name}");
    };
    let (base, query) = url.split_once('?').map_or((url, ""), |(b, q)| (b, q));
    let end = base[authority..]
        .find('/')
        .map_or(base.len(), |i| authority + i);
    let question = if query.is_empty() { "" } else { "?" };
    format!("{}/{name}{question}{query}", &base[..end])
}
