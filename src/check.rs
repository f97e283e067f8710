//! What is refused before any SQL, naming the field and never its value.

use std::io;

use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::entry::OutboxEntry;
use crate::error::StoreError;
use crate::status::OutboxStatus;

const LABEL_BYTES: usize = 255;
const KEY_BYTES: usize = 1024;

/// The default limit of payload and headers together, in bytes of JSON.
pub const MAX_PAYLOAD_BYTES: usize = 1 << 20;

/// Deeper nesting than this cannot be read back: serde_json stops at 128.
const JSON_DEPTH: usize = 127;

/// The first instant that PostgreSQL holds: 4714-11-24 BC, in microseconds from
/// 1970 (its documentation, table 8.9). Its last is beyond chrono's.
const FIRST_INSTANT: i64 = 946_684_800_000_000 - 211_813_488_000_000_000;

/// Everything about an entry that can be judged without the database.
pub(crate) fn entry(entry: &OutboxEntry, max_payload: usize) -> Result<(), StoreError> {
    if entry.status != OutboxStatus::Pending {
        return Err(StoreError::invalid("status"));
    }
    label("destination", &entry.destination, LABEL_BYTES)?;
    label("idempotency_key", &entry.idempotency_key, KEY_BYTES)?;
    if let Some(key) = &entry.ordering_key {
        label("ordering_key", key, LABEL_BYTES)?;
    }
    attempts(entry.attempt_count)?;
    instant("created_at", entry.created_at)?;
    for (field, at) in [
        ("next_attempt_at", entry.next_attempt_at),
        ("completed_at", entry.completed_at),
    ] {
        at.map_or(Ok(()), |at| instant(field, at))?;
    }
    json("payload", &entry.payload)?;
    if let Some(headers) = &entry.headers {
        object("headers", headers)?;
    }
    let bytes = encoded_len("payload", &entry.payload)?
        + entry
            .headers
            .as_ref()
            .map_or(Ok(0), |headers| encoded_len("headers", headers))?;
    if bytes > max_payload {
        return Err(StoreError::invalid("payload"));
    }
    Ok(())
}

/// The count as the column holds it.
pub(crate) fn attempts(count: u32) -> Result<i32, StoreError> {
    i32::try_from(count).map_err(|_| StoreError::invalid("attempt_count"))
}

/// Text that the database can hold.
pub(crate) fn text(field: &'static str, text: &str) -> Result<(), StoreError> {
    if text.contains('\0') {
        return Err(StoreError::unencodable(field));
    }
    Ok(())
}

/// An instant that the column can hold.
pub(crate) fn instant(field: &'static str, at: DateTime<Utc>) -> Result<(), StoreError> {
    if at.timestamp_micros() < FIRST_INSTANT {
        return Err(StoreError::unencodable(field));
    }
    Ok(())
}

fn label(field: &'static str, value: &str, max_bytes: usize) -> Result<(), StoreError> {
    text(field, value)?;
    if value.is_empty() || value.len() > max_bytes {
        return Err(StoreError::invalid(field));
    }
    Ok(())
}

fn object(field: &'static str, members: &Map<String, Value>) -> Result<(), StoreError> {
    for (key, value) in members {
        text(field, key)?;
        json(field, value)?;
    }
    Ok(())
}

/// JSON that `jsonb` can hold and that can be read back. Walks without
/// recursion: the depth is what is being checked.
fn json(field: &'static str, root: &Value) -> Result<(), StoreError> {
    let mut open = vec![(root, 1)];
    while let Some((value, depth)) = open.pop() {
        if depth > JSON_DEPTH {
            return Err(StoreError::unencodable(field));
        }
        match value {
            Value::String(string) => text(field, string)?,
            Value::Array(items) => open.extend(items.iter().map(|item| (item, depth + 1))),
            Value::Object(members) => {
                for (key, member) in members {
                    text(field, key)?;
                    open.push((member, depth + 1));
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }
    Ok(())
}

fn encoded_len(field: &'static str, value: &impl Serialize) -> Result<usize, StoreError> {
    let mut count = ByteCount(0);
    serde_json::to_writer(&mut count, value).map_err(|_| StoreError::unencodable(field))?;
    Ok(count.0)
}

struct ByteCount(usize);

impl io::Write for ByteCount {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn sound() -> OutboxEntry {
        OutboxEntry::new("a", "k", &json!({ "i": 1 })).unwrap()
    }

    fn refusal(change: impl FnOnce(&mut OutboxEntry)) -> StoreError {
        let mut changed = sound();
        change(&mut changed);
        entry(&changed, MAX_PAYLOAD_BYTES).unwrap_err()
    }

    #[test]
    fn lengths_are_counted_in_bytes() {
        assert_eq!(entry(&sound(), MAX_PAYLOAD_BYTES), Ok(()));
        let invalid = StoreError::invalid;
        assert_eq!(
            refusal(|e| e.destination = "é".repeat(128)),
            invalid("destination")
        );
        assert_eq!(
            refusal(|e| e.destination = String::new()),
            invalid("destination")
        );
        assert_eq!(
            refusal(|e| e.idempotency_key = "k".repeat(1025)),
            invalid("idempotency_key")
        );
        assert_eq!(
            refusal(|e| e.ordering_key = Some("k".repeat(256))),
            invalid("ordering_key")
        );
        assert_eq!(
            refusal(|e| e.ordering_key = Some(String::new())),
            invalid("ordering_key")
        );
        assert_eq!(
            refusal(|e| e.payload = json!("x".repeat(MAX_PAYLOAD_BYTES))),
            invalid("payload")
        );
        let mut largest = sound();
        largest.payload = json!("x".repeat(MAX_PAYLOAD_BYTES - 2));
        assert_eq!(entry(&largest, MAX_PAYLOAD_BYTES), Ok(()));
    }

    #[test]
    fn what_cannot_be_stored_or_read_back_is_a_serialization_error() {
        let unencodable = StoreError::unencodable;
        assert_eq!(
            refusal(|e| e.payload = json!({"a": {"b": {"c": {"d": {"\0": 1}}}}})),
            unencodable("payload")
        );
        assert_eq!(
            refusal(|e| e.idempotency_key = "\0".into()),
            unencodable("idempotency_key")
        );
        assert_eq!(
            refusal(|e| e.ordering_key = Some("\0".into())),
            unencodable("ordering_key")
        );
        assert_eq!(
            refusal(|e| e.headers = Some([("h".to_owned(), json!("\0"))].into_iter().collect())),
            unencodable("headers")
        );
        let nested = |depth| (1..depth).fold(json!(1), |inner, _| json!([inner]));
        assert_eq!(
            refusal(|e| e.payload = nested(JSON_DEPTH + 1)),
            unencodable("payload")
        );
        let deepest = nested(JSON_DEPTH);
        assert_eq!(json("payload", &deepest), Ok(()));
        let text = serde_json::to_string(&deepest).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), deepest);
        assert_eq!(
            refusal(|e| e.created_at = DateTime::<Utc>::MIN_UTC),
            unencodable("created_at")
        );
    }
}
