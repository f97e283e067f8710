//! The dispatcher's backend on PostgreSQL.

mod connection;
mod sleep;
mod wakeup;

use std::time::Duration;

use diesel::pg::PgConnection;

use self::connection::Connection;
use crate::dispatcher::Route;
use crate::dispatcher::backend::{
    Answer, Backend, Claim, Claimed, Due, Fence, KeyedClaim, Probe, ProbeFence, Session,
    Settlement, Verdict,
};
use crate::dispatcher::bell::Ear;
use crate::error::StoreError;
use crate::query;
use crate::record::OutboxRecord;

/// Makes sessions with a connection each; never shows its URL.
pub(crate) struct PgBackend {
    url: String,
    route: Route,
    deadline: Duration,
}

impl PgBackend {
    /// `deadline`: how long anybody waits for an answer.
    pub(crate) fn new(url: &str, route: Route, deadline: Duration) -> Self {
        Self {
            url: url.to_owned(),
            route,
            deadline,
        }
    }

    fn connection(&self, role: &'static str) -> Connection {
        self.connection_by(self.route, role)
    }

    fn connection_by(&self, route: Route, role: &'static str) -> Connection {
        Connection::new(&self.url, route, self.deadline, role)
    }
}

impl Backend for PgBackend {
    fn session(&self, role: &'static str) -> Box<dyn Session> {
        Box::new(PgSession {
            connection: self.connection(role),
        })
    }

    fn listen(&self, ear: &Ear) {
        match self.route {
            Route::Direct => wakeup::listen(
                self.connection("listener"),
                // It works behind whatever pooler there may be, so that what fails is
                // the notification, and is said to.
                self.connection_by(Route::TransactionPooler, "echo"),
                ear,
            ),
            Route::TransactionPooler => ear.poll_only(),
        }
    }
}

struct PgSession {
    connection: Connection,
}

impl PgSession {
    fn transaction<T>(
        &mut self,
        operation: impl FnOnce(&mut PgConnection) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        self.connection.transaction(operation)
    }
}

impl Session for PgSession {
    fn due(&mut self, destinations: &[String]) -> Result<Due, StoreError> {
        self.connection
            .statement(|conn| query::due(conn, destinations))
    }

    fn claim(&mut self, claim: &Claim) -> Result<Claimed, StoreError> {
        self.transaction(|conn| query::claim_ready(conn, claim))
    }

    fn claim_keyed(&mut self, claim: &Claim, cursor: &str) -> Result<KeyedClaim, StoreError> {
        self.connection
            .short_transaction(|conn| query::claim_keyed(conn, claim, cursor))
    }

    fn held(&mut self, worker_id: &str) -> Result<Vec<Fence>, StoreError> {
        self.connection
            .statement(|conn| query::held(conn, worker_id))
    }

    fn settle(
        &mut self,
        worker_id: &str,
        settlements: &[Settlement],
    ) -> Result<Vec<Verdict>, StoreError> {
        self.transaction(|conn| query::settle(conn, worker_id, settlements))
    }

    fn renew(
        &mut self,
        worker_id: &str,
        fences: &[Fence],
        lease: Duration,
    ) -> Result<Vec<i64>, StoreError> {
        self.transaction(|conn| query::renew(conn, worker_id, fences, lease))
    }

    fn lapse(
        &mut self,
        destinations: &[String],
        foreign_lease: Duration,
        limit: i64,
    ) -> Result<usize, StoreError> {
        self.transaction(|conn| query::lapse(conn, destinations, foreign_lease, limit))
    }

    fn with_unknown(&mut self, destinations: &[String]) -> Result<Vec<String>, StoreError> {
        self.connection
            .statement(|conn| query::with_unknown(conn, destinations))
    }

    fn claim_probes(
        &mut self,
        probe: &Probe,
    ) -> Result<Vec<(ProbeFence, OutboxRecord)>, StoreError> {
        self.transaction(|conn| {
            query::stamp_unknown(conn, &probe.destination)?;
            query::claim_probes(conn, probe)
        })
    }

    fn resend_ripe(&mut self, probe: &Probe) -> Result<usize, StoreError> {
        self.transaction(|conn| {
            query::stamp_unknown(conn, &probe.destination)?;
            query::park_exhausted(conn, &probe.destination, probe.max_attempts)?;
            query::resend_ripe(conn, probe)
        })
    }

    fn answer(&mut self, fence: ProbeFence, answer: &Answer) -> Result<bool, StoreError> {
        self.transaction(|conn| query::answer(conn, fence, answer))
    }
}
