//! The rows and dispatchers of most tests, and what became of them.

use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, unbounded};
use diesel::prelude::*;
use diesel::sql_types::Text;
use diesel_outbox::schema::tf_outbox;
use diesel_outbox::{
    Backoff, Destination, Dispatched, Dispatcher, DispatcherBuilder, OutboxEntry, OutboxId,
    OutboxRecord, OutboxStatus, enqueue_all, get,
};
use serde_json::json;

use super::db::TestDb;
use super::wait::eventually;

/// Long enough for anything that happens at all.
pub const SOON: Duration = Duration::from_secs(10);

pub fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// As the cases have it: base delay 100 ms, no jitter.
pub fn idempotent(
    name: &str,
    sender: impl Fn(&OutboxEntry) -> Dispatched + Send + Sync + 'static,
) -> Destination {
    Destination::idempotent(name, sender)
        .with_backoff(Backoff::exponential(ms(100), Duration::from_secs(3600)).with_jitter(0.0))
}

pub fn dispatcher(db: &TestDb, destination: Destination) -> DispatcherBuilder {
    Dispatcher::builder(db.url())
        .destination(destination)
        .with_maintenance_interval(ms(200))
}

/// A sender that waits at a gate, and says when it is there.
pub fn gated() -> (
    impl Fn(&OutboxEntry) -> Dispatched + Send + Sync + 'static,
    Receiver<u64>,
    Sender<Dispatched>,
) {
    let (arrived, arrivals) = unbounded();
    let (answer, answers) = unbounded::<Dispatched>();
    let send = move |entry: &OutboxEntry| {
        // The test may be over.
        let _ = arrived.send(i_of(entry));
        answers.recv().unwrap_or_else(|_| Dispatched::unknown())
    };
    (send, arrivals, answer)
}

pub fn rows(n: usize) -> Vec<OutboxEntry> {
    (1..=n)
        .map(|i| OutboxEntry::new("a", format!("k{i}"), &json!({ "i": i })).unwrap())
        .collect()
}

pub fn enqueued(db: &TestDb, n: usize) -> Vec<OutboxId> {
    let rows = rows(n);
    enqueue_all(&mut db.connect(), &rows).unwrap();
    rows.iter().map(|row| row.outbox_id).collect()
}

pub fn i_of(entry: &OutboxEntry) -> u64 {
    entry.payload["i"].as_u64().unwrap()
}

pub fn until_status(conn: &mut PgConnection, id: OutboxId, status: OutboxStatus) -> OutboxRecord {
    eventually(SOON, status.as_str(), || {
        get(conn, id)
            .ok()
            .filter(|record| record.entry.status == status)
    })
}

pub fn with_status(conn: &mut PgConnection, status: &str) -> i64 {
    tf_outbox::table
        .filter(tf_outbox::status.eq(status))
        .count()
        .get_result(conn)
        .unwrap()
}

/// Every column of a row and its version, as the server prints them.
pub fn whole_row(conn: &mut PgConnection, id: OutboxId) -> String {
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
