//! The order service: an ordinary blocking HTTP server. The one interesting
//! function is [`place`].

use std::io::{self, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::time::Duration;

use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, Pool};
use diesel_outbox::{OutboxEntry, StoreError, enqueue};
use oxhttp::model::header::{CONNECTION, CONTENT_TYPE, HeaderValue};
use oxhttp::model::{Body, Method, Request, Response};
use oxhttp::{ListeningServer, Server};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::{Outcome, end_with_parent};

const CONNECTIONS: usize = 8;
/// Clients at a time; each has a thread.
const CLIENTS: usize = 128;
/// How long a client may keep us waiting for its next byte.
const PATIENCE: Duration = Duration::from_secs(10);
const MAX_BODY: u64 = 1 << 20;
/// Of a body that is too large this much is read all the same: a client that is
/// still sending may miss an answer that comes with the end of its connection.
const MAX_DRAINED: u64 = 8 << 20;

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
    let pool: Connections = Pool::builder()
        .max_size(CONNECTIONS as u32)
        .build_unchecked(ConnectionManager::new(url));
    let (port, server) = listen(move |request| serve(request, &pool))?;
    println!("port {port}");
    Ok(server.join()?)
}

/// On a free port. The server does not say which one it was given, so one is
/// found for it; another process may be faster.
fn listen(
    handler: impl Fn(&mut Request<Body>) -> Response<Body> + Clone + Send + Sync + 'static,
) -> io::Result<(u16, ListeningServer)> {
    for _ in 0..10 {
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
        let server = Server::new(handler.clone())
            .bind(SocketAddr::from((Ipv4Addr::LOCALHOST, free.port())))
            .with_global_timeout(PATIENCE)
            .with_max_concurrent_connections(CLIENTS);
        match server.spawn() {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            spawned => return Ok((free.port(), spawned?)),
        }
    }
    Err(io::ErrorKind::AddrInUse.into())
}

fn serve(request: &mut Request<Body>, pool: &Connections) -> Response<Body> {
    let (status, body) = match order(request, pool) {
        Ok(id) => (201, json!({ "id": id })),
        Err(Refusal::Bad(status, field, error)) => {
            (status, json!({ "error": error, "field": field }))
        }
        Err(refusal) => refused(refusal),
    };
    let mut response = Response::new(Body::from(body.to_string()));
    if let Ok(status) = status.try_into() {
        *response.status_mut() = status;
    }
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    if status != 201 {
        leave_unread(request);
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(CONNECTION, close);
    }
    response
}

/// The server reads what is left of a body before it answers, however much a
/// client has announced; this ends the connection instead.
fn leave_unread(request: &mut Request<Body>) {
    if request
        .body()
        .len()
        .is_none_or(|length| length <= MAX_DRAINED)
    {
        // The client may be gone.
        let _ = io::copy(&mut request.body_mut().take(MAX_DRAINED), &mut io::sink());
    }
    *request.body_mut() = Body::empty();
    let close = HeaderValue::from_static("close");
    request.headers_mut().insert(CONNECTION, close);
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

fn order(request: &mut Request<Body>, pool: &Connections) -> Result<Uuid, Refusal> {
    let bad = |status, field, error| Err(Refusal::Bad(status, field, error));
    if request.uri().path() != "/orders" {
        return bad(404, "path", "there is only /orders");
    }
    if *request.method() != Method::POST {
        return bad(405, "method", "only POST");
    }
    if request.body().len().is_some_and(|length| length > MAX_BODY) {
        return bad(413, "body", "larger than 1 MiB");
    }
    let mut body = Vec::new();
    let read = request.body_mut().take(MAX_BODY + 1).read_to_end(&mut body);
    if read.is_err() {
        return bad(400, "body", "cannot be read");
    }
    if body.len() as u64 > MAX_BODY {
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
