//! Reading rows.

use chrono::{DateTime, Utc};
use diesel::pg::PgConnection;
use diesel::prelude::*;

use super::decode::{ENTRY, EntryRow, META, MetaRow, StatusText, record};
use super::expression::statement_timestamp;
use super::fault::{OrStoreError, Phase};
use crate::error::StoreError;
use crate::id::{CommandId, OutboxId};
use crate::record::OutboxRecord;
use crate::schema::tf_outbox;
use crate::status::OutboxStatus;

/// Loads one row.
///
/// # Errors
/// * [`StoreError::NotFound`]: there is none.
/// * [`StoreError::Corrupt`], naming the column: it holds a value that cannot be
///   read.
/// * [`StoreError::Unavailable`], [`StoreError::Timeout`]: see [`StoreError`].
pub fn get(conn: &mut PgConnection, outbox_id: OutboxId) -> Result<OutboxRecord, StoreError> {
    let (entry, meta, now) = tf_outbox::table
        .find(outbox_id.0)
        .select((ENTRY, META, statement_timestamp()))
        .first::<(EntryRow, MetaRow, DateTime<Utc>)>(conn)
        .or_store_error(Phase::Read)?;
    record(entry, meta, now)
}

/// Every row that `command_id` produced, ordered by creation time, then id.
///
/// # Errors
/// * [`StoreError::Corrupt`], naming the column: one of them holds a value that
///   cannot be read. [`get`] reads the others.
/// * [`StoreError::Unavailable`], [`StoreError::Timeout`]: see [`StoreError`].
pub fn list_for_command(
    conn: &mut PgConnection,
    command_id: CommandId,
) -> Result<Vec<OutboxRecord>, StoreError> {
    tf_outbox::table
        .filter(tf_outbox::command_id.eq(command_id.0))
        .order((tf_outbox::created_at, tf_outbox::outbox_id))
        .select((ENTRY, META, statement_timestamp()))
        .load::<(EntryRow, MetaRow, DateTime<Utc>)>(conn)
        .or_store_error(Phase::Read)?
        .into_iter()
        .map(|(entry, meta, now)| record(entry, meta, now))
        .collect()
}

/// Why a compare-and-swap found no row: it is in one of the states that make
/// the call a repetition, it is in another, or it does not exist.
pub(crate) fn accept_if(
    conn: &mut PgConnection,
    outbox_id: OutboxId,
    repeated: Option<OutboxStatus>,
) -> Result<(), StoreError> {
    let status = tf_outbox::table
        .find(outbox_id.0)
        .select(tf_outbox::status)
        .first::<super::decode::Kept<StatusText>>(conn)
        .or_store_error(Phase::Read)?
        .read("status")?
        .0;
    if Some(status) == repeated {
        Ok(())
    } else {
        Err(StoreError::Conflict)
    }
}
