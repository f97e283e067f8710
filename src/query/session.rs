//! What a session says and holds beside its transactions: notifications and
//! session locks.

use diesel::pg::PgConnection;
use diesel::prelude::*;

use super::expression::{pg_advisory_unlock, pg_notify, pg_try_advisory_lock};
use super::fault::{OrStoreError, Phase};
use crate::error::StoreError;

/// The channel on which dispatchers listen. A notification carries nothing.
pub(crate) const CHANNEL: &str = "tf_outbox";

/// Wakes dispatchers when the transaction commits.
pub(crate) fn notify(conn: &mut PgConnection, phase: Phase) -> Result<(), StoreError> {
    diesel::select(pg_notify(CHANNEL, ""))
        .execute(conn)
        .map(drop)
        .or_store_error(phase)
}

/// Says something on another channel.
pub(crate) fn notify_on(
    conn: &mut PgConnection,
    channel: &str,
    payload: &str,
) -> Result<(), StoreError> {
    diesel::select(pg_notify(channel, payload))
        .execute(conn)
        .map(drop)
        .or_store_error(Phase::Read)
}

/// Takes a lock for the session, unless another has it.
pub(crate) fn try_lock(
    conn: &mut PgConnection,
    class: i32,
    object: i32,
) -> Result<bool, StoreError> {
    diesel::select(pg_try_advisory_lock(class, object))
        .get_result(conn)
        .or_store_error(Phase::Read)
}

/// Gives a lock of the session back.
pub(crate) fn unlock(conn: &mut PgConnection, class: i32, object: i32) -> Result<(), StoreError> {
    diesel::select(pg_advisory_unlock(class, object))
        .get_result::<bool>(conn)
        .map(drop)
        .or_store_error(Phase::Read)
}
