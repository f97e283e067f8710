//! One connection of the dispatcher's own, made when needed and again after a
//! failure.

use std::time::Duration;

use diesel::Connection as _;
use diesel::connection::CacheSize;
use diesel::pg::PgConnection;

use crate::dispatcher::Route;

use crate::error::StoreError;
use crate::query::{connection_fault, transaction};

/// Everything that the transaction relies on, pinned in one round trip: the
/// isolation that the statements are made for, and ends to waiting. `SET LOCAL`
/// leaves nothing behind on a connection that a proxy shares. A process that is
/// frozen inside a transaction loses it, with its locks, after the idle timeout.
fn begin(idle: Duration, statement: Duration) -> String {
    format!(
        "BEGIN ISOLATION LEVEL READ COMMITTED; \
         SET LOCAL idle_in_transaction_session_timeout = {}; \
         SET LOCAL lock_timeout = 2000; \
         SET LOCAL statement_timeout = {}",
        idle.as_millis(),
        statement.as_millis()
    )
}

/// How long a transaction may wait for its client.
const IDLE: Duration = Duration::from_secs(5);
/// The same for a transaction that others queue behind: a process that is frozen
/// in it holds up the keyed claims of its destination this long.
const IDLE_SHORT: Duration = Duration::from_secs(2);

/// Connection options that we add where the user has not set them: a peer that
/// is gone without a word is noticed within half a minute, and no connect waits
/// for ever.
const OPTIONS: [(&str, &str); 7] = [
    ("connect_timeout", "5"),
    ("keepalives", "1"),
    ("keepalives_idle", "10"),
    ("keepalives_interval", "5"),
    ("keepalives_count", "3"),
    ("tcp_user_timeout", "30000"),
    ("application_name", "diesel-outbox"),
];

pub(super) struct Connection {
    begin: String,
    begin_short: String,
    url: String,
    route: Route,
    open: Option<PgConnection>,
}

impl Connection {
    /// `deadline`: when whoever asks stops waiting for the answer.
    pub(super) fn new(url: &str, route: Route, deadline: Duration, role: &'static str) -> Self {
        // The server's own "no" comes before that.
        let statement = deadline * 5 / 6;
        Self {
            begin: begin(IDLE, statement),
            begin_short: begin(IDLE_SHORT, statement),
            url: with_options(url, role, deadline),
            route,
            open: None,
        }
    }

    /// The open connection, or a new one.
    pub(super) fn get(&mut self) -> Result<&mut PgConnection, StoreError> {
        match self.open {
            Some(ref mut open) => Ok(open),
            None => {
                let mut made =
                    PgConnection::establish(&self.url).map_err(|e| connection_fault(&e))?;
                if self.route == Route::TransactionPooler {
                    // A statement prepared on one server connection is unknown to
                    // the next.
                    made.set_prepared_statement_cache_size(CacheSize::Disabled);
                }
                Ok(self.open.insert(made))
            }
        }
    }

    /// Forgets the connection: the next use makes a new one.
    pub(super) fn close(&mut self) {
        self.open = None;
    }

    pub(super) fn transaction<T>(
        &mut self,
        operation: impl FnOnce(&mut PgConnection) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let begin = self.begin.clone();
        self.run(|conn| transaction(conn, &begin, operation))
    }

    /// One that holds a lock which others need.
    pub(super) fn short_transaction<T>(
        &mut self,
        operation: impl FnOnce(&mut PgConnection) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let begin = self.begin_short.clone();
        self.run(|conn| transaction(conn, &begin, operation))
    }

    /// One statement that only reads.
    pub(super) fn statement<T>(
        &mut self,
        operation: impl FnOnce(&mut PgConnection) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        match self.route {
            Route::Direct => self.run(operation),
            // Preparing and executing may meet two server connections unless a
            // transaction holds on to one.
            Route::TransactionPooler => self.transaction(operation),
        }
    }

    fn run<T>(
        &mut self,
        operation: impl FnOnce(&mut PgConnection) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let result = self.get().and_then(operation);
        // Of these we cannot tell in what state they left the connection; a new
        // one is cheap beside the wait that follows a failure.
        if result.is_err() {
            self.close();
        }
        result
    }
}

/// Adds our options to a connection string of either form (URI, or
/// `keyword=value`), unless it sets them itself.
fn with_options(url: &str, role: &str, deadline: Duration) -> String {
    let uri = url.starts_with("postgres://") || url.starts_with("postgresql://");
    let mut full = url.to_owned();
    let mut asked = url.contains('?');
    for (name, value) in OPTIONS {
        if url.contains(&format!("{name}=")) {
            continue;
        }
        let value = match name {
            "application_name" => format!("{value}-{role}"),
            // libpq knows no less than two seconds.
            "connect_timeout" if deadline < Duration::from_secs(10) => "2".to_owned(),
            _ => value.to_owned(),
        };
        if uri {
            full.push(if asked { '&' } else { '?' });
            asked = true;
        } else {
            full.push(' ');
        }
        full.push_str(name);
        full.push('=');
        full.push_str(&value);
    }
    full
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(12);

    #[test]
    fn options_are_added_to_both_forms_and_never_over_the_users() {
        let uri = with_options("postgres://u:p@h/db", "claimer", LONG);
        assert!(uri.starts_with("postgres://u:p@h/db?connect_timeout=5&keepalives=1&"));
        assert!(uri.ends_with("&application_name=diesel-outbox-claimer"));

        let asked = with_options("postgres://h/db?connect_timeout=1", "claimer", LONG);
        assert!(asked.starts_with("postgres://h/db?connect_timeout=1&keepalives=1&"));
        assert_eq!(asked.matches("connect_timeout").count(), 1);

        let short = with_options("postgres://h/db", "claimer", Duration::from_secs(3));
        assert!(short.starts_with("postgres://h/db?connect_timeout=2&"));

        let pairs = with_options("host=h dbname=db", "claimer", LONG);
        assert!(pairs.starts_with("host=h dbname=db connect_timeout=5 keepalives=1 "));
    }
}
