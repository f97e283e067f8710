//! The order service: an ordinary blocking HTTP server. The one interesting
//! function is [`place`].

use std::io::Read;
use std::sync::Arc;
use std::thread;

use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, Pool};
use diesel_outbox::{OutboxEntry, StoreError, enqueue};
use serde_json::{Value, json};
use tiny_http::{Header, Method, Request, Response, Server};
use uuid::Uuid;

use crate::{Outcome, end_with_parent};

const THREADS: usize = 8;
const MAX_BODY: usize = 1 << 20;

diesel::table! {
    orders (id) {
        id -> Uuid,
        key -> Text,
    }
}

type Connections = Pool<ConnectionManager<PgConnection>>;

/// Why an order was not placed.
enum Refusal {
    /// The client's fault: a status of the 400s and the field.
    Bad(u16, &'static str, &'static str),
    Outbox(StoreError),
    Database(diesel::result::Error),
    NoConnection,
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        Self::Outbox(error)
    }
}

impl From<diesel::result::Error> for Refusal {
    fn from(error: diesel::result::Error) -> Self {
        Self::Database(error)
    }
}

/// Writes the order and what is to be done about it, both or neither.
fn place(conn: &mut PgConnection, key: &str, payload: &Value) -> Result<Uuid, Refusal> {
    let id = Uuid::now_v7();
    let charge = OutboxEntry::new("payments", key, payload)?;
    conn.transaction(|conn| {
        diesel::insert_into(orders::table)
            .values((orders::id.eq(id), orders::key.eq(key)))
            .execute(conn)?;
        enqueue(conn, &charge)?;
        Ok(id)
    })
}

pub(crate) fn run(url: &str) -> Outcome {
    end_with_parent(|| {});
    let server = Arc::new(Server::http("127.0.0.1:0")?);
    let pool: Connections = Pool::builder()
        .max_size(THREADS as u32)
        .build_unchecked(ConnectionManager::new(url));
    let port = server.server_addr().to_ip().ok_or("no port")?.port();
    println!("port {port}");
    let workers: Vec<_> = (0..THREADS)
        .map(|_| {
            let (server, pool) = (Arc::clone(&server), pool.clone());
            thread::spawn(move || {
                while let Ok(request) = server.recv() {
                    serve(request, &pool);
                }
            })
        })
        .collect();
    for worker in workers {
        worker
            .join()
            .map_err(|_| "a thread of the service panicked")?;
    }
    Ok(())
}

fn serve(mut request: Request, pool: &Connections) {
    let (status, body) = match order(&mut request, pool) {
        Ok(id) => (201, json!({ "id": id })),
        Err(Refusal::Bad(status, field, error)) => {
            (status, json!({ "error": error, "field": field }))
        }
        Err(refusal) => refused(refusal),
    };
    let json = Header::from_bytes("content-type", "application/json");
    let mut response = Response::from_string(body.to_string()).with_status_code(status);
    if let Ok(json) = json {
        response.add_header(json);
    }
    // The client may be gone.
    let _ = request.respond(response);
}

/// What the database or the outbox said, in the client's terms.
fn refused(refusal: Refusal) -> (u16, Value) {
    let bad =
        |status, field: &str, error: &str| (status, json!({ "error": error, "field": field }));
    match refusal {
        Refusal::Outbox(StoreError::Conflict) => bad(409, "key", "this order exists"),
        Refusal::Database(diesel::result::Error::DatabaseError(
            diesel::result::DatabaseErrorKind::UniqueViolation,
            _,
        )) => bad(409, "key", "this order exists"),
        Refusal::Outbox(StoreError::Serialization { field }) => {
            bad(422, field_of_order(field), "this cannot be stored")
        }
        Refusal::Outbox(StoreError::Other {
            field: Some(field), ..
        }) => bad(422, field_of_order(Some(field)), "too long, or empty"),
        _ => (503, json!({ "error": "try again later" })),
    }
}

/// The outbox names its own fields; the client knows only its order's.
fn field_of_order(field: Option<&str>) -> &'static str {
    match field {
        Some("idempotency_key") => "key",
        _ => "payload",
    }
}

fn order(request: &mut Request, pool: &Connections) -> Result<Uuid, Refusal> {
    let bad = |status, field, error| Err(Refusal::Bad(status, field, error));
    if request.url() != "/orders" {
        return bad(404, "path", "there is only /orders");
    }
    if *request.method() != Method::Post {
        return bad(405, "method", "only POST");
    }
    if request
        .body_length()
        .is_some_and(|length| length > MAX_BODY)
    {
        return bad(413, "body", "larger than 1 MiB");
    }
    let mut body = Vec::new();
    let read = request
        .as_reader()
        .take(MAX_BODY as u64 + 1)
        .read_to_end(&mut body);
    if read.is_err() {
        return bad(400, "body", "cannot be read");
    }
    if body.len() > MAX_BODY {
        return bad(413, "body", "larger than 1 MiB");
    }
    let Ok(Value::Object(mut fields)) = serde_json::from_slice(&body) else {
        return bad(400, "body", "not a JSON object");
    };
    let Some(Value::String(key)) = fields.remove("key") else {
        return bad(422, "key", "missing, or not a string");
    };
    let Some(payload @ Value::Object(_)) = fields.remove("payload") else {
        return bad(422, "payload", "missing, or not an object");
    };
    // Before PostgreSQL is asked, since the order's own table takes the key too.
    if key.contains('\0') || key.is_empty() || key.len() > 200 {
        return bad(422, "key", "1 to 200 bytes without NUL");
    }
    let mut conn = pool.get().map_err(|_| Refusal::NoConnection)?;
    place(&mut conn, &key, &payload)
}
