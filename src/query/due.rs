//! One look at many destinations: what is due, what is unknown.

use chrono::{DateTime, Utc};
use diesel::pg::PgConnection;
use diesel::prelude::*;

use super::decode::Kept;
use super::expression::{
    statement_timestamp, tf_outbox_due_destinations, tf_outbox_due_keyed_destinations,
    tf_outbox_next_due, tf_outbox_unknown_destinations,
};
use super::fault::{OrStoreError, Phase};
use crate::claim::Due;
use crate::error::StoreError;

/// Which of `destinations` have due rows, and when the next row falls due: one
/// statement, two descents of an index a destination.
pub(crate) fn due(conn: &mut PgConnection, destinations: &[String]) -> Result<Due, StoreError> {
    let (ready, keyed, next, now) = diesel::select((
        tf_outbox_due_destinations(destinations),
        tf_outbox_due_keyed_destinations(destinations),
        tf_outbox_next_due(destinations),
        statement_timestamp(),
    ))
    .get_result::<(
        Vec<String>,
        Vec<String>,
        Kept<Option<DateTime<Utc>>>,
        DateTime<Utc>,
    )>(conn)
    .or_store_error(Phase::Read)?;
    // An instant beyond what we can read is no time to wait for.
    let next = next.0.flatten().and_then(|at| (at - now).to_std().ok());
    Ok(Due { ready, keyed, next })
}

/// Which of `destinations` have rows of unknown outcome.
pub(crate) fn with_unknown(
    conn: &mut PgConnection,
    destinations: &[String],
) -> Result<Vec<String>, StoreError> {
    diesel::select(tf_outbox_unknown_destinations(destinations))
        .get_result(conn)
        .or_store_error(Phase::Read)
}
