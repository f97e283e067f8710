//! Reading rows so that one which cannot be decoded does not take its
//! neighbours with it.

use chrono::{DateTime, Utc};
use diesel::deserialize::{self, FromSql, FromSqlRow, Queryable};
use diesel::pg::{Pg, PgValue};
use diesel::serialize::{self, Output, ToSql};
use diesel::sql_types::Text;
use diesel::{AsExpression, backend::Backend};
use serde_json::{Map, Value};
use uuid::Uuid;

use crate::entry::OutboxEntry;
use crate::error::StoreError;
use crate::id::{CommandId, OutboxId};
use crate::record::{OutboxClaim, OutboxRecord};
use crate::schema::tf_outbox;
use crate::status::OutboxStatus;

/// The column of `status`, as the type that says what it may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, AsExpression, FromSqlRow)]
#[diesel(sql_type = Text)]
pub(crate) struct StatusText(pub(crate) OutboxStatus);

impl FromSql<Text, Pg> for StatusText {
    fn from_sql(value: PgValue<'_>) -> deserialize::Result<Self> {
        Ok(Self(std::str::from_utf8(value.as_bytes())?.parse()?))
    }
}

impl ToSql<Text, Pg> for StatusText {
    fn to_sql<'b>(&'b self, out: &mut Output<'b, '_, Pg>) -> serialize::Result {
        <str as ToSql<Text, Pg>>::to_sql(self.0.as_str(), out)
    }
}

/// A column's value, or the knowledge that it cannot be read. Diesel would fail
/// the whole result for one such value.
#[derive(Debug, FromSqlRow)]
pub(crate) struct Kept<T>(pub(crate) Option<T>);

impl<T, ST> FromSql<ST, Pg> for Kept<T>
where
    T: FromSql<ST, Pg>,
{
    fn from_sql(value: <Pg as Backend>::RawValue<'_>) -> deserialize::Result<Self> {
        Ok(Self(T::from_sql(value).ok()))
    }

    fn from_nullable_sql(
        value: Option<<Pg as Backend>::RawValue<'_>>,
    ) -> deserialize::Result<Self> {
        Ok(Self(T::from_nullable_sql(value).ok()))
    }
}

impl<T> Kept<T> {
    pub(crate) fn read(self, field: &'static str) -> Result<T, StoreError> {
        self.0.ok_or(StoreError::corrupt(field))
    }
}

/// The columns of an [`OutboxEntry`].
pub(crate) type EntryColumns = (
    tf_outbox::outbox_id,
    tf_outbox::command_id,
    tf_outbox::destination,
    tf_outbox::payload,
    tf_outbox::idempotency_key,
    tf_outbox::status,
    tf_outbox::attempt_count,
    tf_outbox::next_attempt_at,
    tf_outbox::created_at,
    tf_outbox::completed_at,
    tf_outbox::headers,
    tf_outbox::ordering_key,
);

/// See [`EntryColumns`].
pub(crate) const ENTRY: EntryColumns = (
    tf_outbox::outbox_id,
    tf_outbox::command_id,
    tf_outbox::destination,
    tf_outbox::payload,
    tf_outbox::idempotency_key,
    tf_outbox::status,
    tf_outbox::attempt_count,
    tf_outbox::next_attempt_at,
    tf_outbox::created_at,
    tf_outbox::completed_at,
    tf_outbox::headers,
    tf_outbox::ordering_key,
);

/// [`ENTRY`] as it comes.
#[derive(Debug, Queryable)]
pub(crate) struct EntryRow {
    pub(crate) outbox_id: Uuid,
    command_id: Uuid,
    destination: Kept<String>,
    payload: Kept<Value>,
    idempotency_key: Kept<String>,
    status: Kept<StatusText>,
    pub(crate) attempt_count: i32,
    next_attempt_at: Kept<Option<DateTime<Utc>>>,
    created_at: Kept<DateTime<Utc>>,
    completed_at: Kept<Option<DateTime<Utc>>>,
    headers: Kept<Option<Value>>,
    ordering_key: Kept<Option<String>>,
}

impl EntryRow {
    pub(crate) fn decode(self) -> Result<OutboxEntry, StoreError> {
        Ok(OutboxEntry {
            outbox_id: OutboxId(self.outbox_id),
            command_id: CommandId(self.command_id),
            destination: self.destination.read("destination")?,
            payload: self.payload.read("payload")?,
            idempotency_key: self.idempotency_key.read("idempotency_key")?,
            status: self.status.read("status")?.0,
            attempt_count: count(self.attempt_count, "attempt_count")?,
            next_attempt_at: self.next_attempt_at.read("next_attempt_at")?,
            created_at: self.created_at.read("created_at")?,
            completed_at: self.completed_at.read("completed_at")?,
            headers: headers(self.headers.read("headers")?)?,
            ordering_key: self.ordering_key.read("ordering_key")?,
        })
    }
}

/// The columns of an [`OutboxRecord`], beside those of its entry.
pub(crate) type MetaColumns = (
    tf_outbox::claim_worker_id,
    tf_outbox::claim_taken_at,
    tf_outbox::last_failure,
    tf_outbox::remote_ref,
    tf_outbox::enqueued_at,
    tf_outbox::unknown_since,
    tf_outbox::probe_count,
    tf_outbox::lapse_count,
    tf_outbox::halts_key,
);

/// See [`MetaColumns`].
pub(crate) const META: MetaColumns = (
    tf_outbox::claim_worker_id,
    tf_outbox::claim_taken_at,
    tf_outbox::last_failure,
    tf_outbox::remote_ref,
    tf_outbox::enqueued_at,
    tf_outbox::unknown_since,
    tf_outbox::probe_count,
    tf_outbox::lapse_count,
    tf_outbox::halts_key,
);

/// [`META`] as it comes.
#[derive(Debug, Queryable)]
pub(crate) struct MetaRow {
    claim_worker_id: Kept<Option<String>>,
    claim_taken_at: Kept<Option<DateTime<Utc>>>,
    last_failure: Kept<Option<String>>,
    remote_ref: Kept<Option<String>>,
    enqueued_at: Kept<DateTime<Utc>>,
    unknown_since: Kept<Option<DateTime<Utc>>>,
    probe_count: i32,
    lapse_count: i32,
    halts_key: bool,
}

/// A record from its two halves and the server's clock.
pub(crate) fn record(
    entry: EntryRow,
    meta: MetaRow,
    now: DateTime<Utc>,
) -> Result<OutboxRecord, StoreError> {
    let unknown_since = meta.unknown_since.read("unknown_since")?;
    let worker_id = meta.claim_worker_id.read("claim_worker_id")?;
    let claimed_at = meta.claim_taken_at.read("claim_taken_at")?;
    Ok(OutboxRecord {
        entry: entry.decode()?,
        claim: worker_id
            .zip(claimed_at)
            .map(|(worker_id, claimed_at)| OutboxClaim {
                worker_id,
                claimed_at,
            }),
        last_failure: meta.last_failure.read("last_failure")?,
        remote_ref: meta.remote_ref.read("remote_ref")?,
        enqueued_at: meta.enqueued_at.read("enqueued_at")?,
        unknown_since,
        unknown_for: unknown_since.map(|since| (now - since).to_std().unwrap_or_default()),
        probe_count: count(meta.probe_count, "probe_count")?,
        lapse_count: count(meta.lapse_count, "lapse_count")?,
        halts_key: meta.halts_key,
    })
}

fn count(value: i32, field: &'static str) -> Result<u32, StoreError> {
    u32::try_from(value).map_err(|_| StoreError::corrupt(field))
}

fn headers(value: Option<Value>) -> Result<Option<Map<String, Value>>, StoreError> {
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(headers)) => Ok(Some(headers)),
        Some(_) => Err(StoreError::corrupt("headers")),
    }
}
