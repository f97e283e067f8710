//! The order service of `examples/order_service`, over real sockets: what is bad
//! is refused by the name of its field, writes nothing and stops nobody.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use diesel::prelude::*;
use serde_json::{Value, json};
use support::db::TestDb;
use support::process::Child;
use support::wait::stretched;

/// Stands in whatever is refused, and may come back to nobody.
const CANARY: &str = "CANARY-4111";

struct Service {
    db: TestDb,
    process: Child,
    at: Port,
}

/// Where it listens.
#[derive(Clone, Copy)]
struct Port(u16);

/// What the service answered.
#[derive(Debug)]
struct Answer {
    status: u16,
    body: Value,
    text: String,
}

impl Service {
    fn start() -> Self {
        let db = TestDb::new();
        db.execute(
            "CREATE TABLE orders (id uuid PRIMARY KEY, key text NOT NULL UNIQUE,
                                  placed_at timestamptz NOT NULL DEFAULT now())",
        );
        let process = Child::spawn_example("order_service", &["role", "service", db.url()], &[]);
        let port = process.wait_line("port", Duration::from_secs(10));
        let at = Port(port.parse().unwrap());
        Self { db, process, at }
    }

    /// How many orders and how many outbox rows there are.
    fn rows(&self) -> (i64, i64) {
        diesel::table! {
            orders (id) { id -> Uuid, key -> Text, }
        }
        let mut conn = self.db.connect();
        let rows = diesel_outbox::schema::tf_outbox::table.count();
        (
            orders::table.count().get_result(&mut conn).unwrap(),
            rows.get_result(&mut conn).unwrap(),
        )
    }

    /// Refused with `status`, naming `field` and nothing else; and the next order
    /// is taken.
    fn refuses(&self, what: &str, answer: &Answer, status: u16, field: &str) {
        assert_eq!(
            (answer.status, &answer.body["field"]),
            (status, &json!(field)),
            "{what}"
        );
        assert!(!answer.text.contains(CANARY), "{what}: {}", answer.text);
        let before = self.rows();
        assert_eq!(
            self.at.order(&format!("good after {what}")).status,
            201,
            "{what}"
        );
        assert_eq!(self.rows(), (before.0 + 1, before.1 + 1), "{what}");
    }

    /// Resident memory in KiB.
    fn memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.pid()));
        let status = status.unwrap_or_default();
        let line = status.lines().find(|line| line.starts_with("VmHWM:"));
        let number = line.and_then(|line| line.split_whitespace().nth(1));
        number.map_or(0, |number| number.parse().unwrap())
    }
}

impl Port {
    fn connect(self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.0)).unwrap();
        let patience = Some(stretched(Duration::from_secs(20)));
        stream.set_read_timeout(patience).unwrap();
        stream.set_write_timeout(patience).unwrap();
        stream
    }

    /// Sends `head`, `body`, and reads until the service closes.
    fn exchange(self, head: &str, body: &[u8]) -> Answer {
        let mut stream = self.connect();
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body).unwrap();
        read_answer(&mut stream)
    }

    fn post(self, body: &[u8]) -> Answer {
        let head = format!(
            "POST /orders HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        self.exchange(&head, body)
    }

    fn order(self, key: &str) -> Answer {
        self.post(
            json!({ "key": key, "payload": { "cents": 42 } })
                .to_string()
                .as_bytes(),
        )
    }
}

fn read_answer(stream: &mut TcpStream) -> Answer {
    let mut bytes = Vec::new();
    if let Err(error) = stream.read_to_end(&mut bytes) {
        // Closed with something of ours unread.
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset, "{error}");
    }
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head.split(' ').nth(1).and_then(|s| s.parse().ok());
    Answer {
        status: status.unwrap_or(0),
        body: serde_json::from_str(body).unwrap_or(Value::Null),
        text,
    }
}

#[test]
fn a_good_order_is_one_order_and_one_row() {
    let service = Service::start();
    let answer = service.at.order("one");
    assert_eq!(answer.status, 201);
    let id: uuid::Uuid = answer.body["id"].as_str().unwrap().parse().unwrap();
    assert!(!id.is_nil());
    assert_eq!(service.rows(), (1, 1));
    // Chunked, and two on one connection.
    let body = json!({ "key": "two", "payload": {} }).to_string();
    let chunked = "POST /orders HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n";
    let (a, b) = body.split_at(7);
    let chunks = format!("{:x}\r\n{a}\r\n{:x}\r\n{b}\r\n0\r\n\r\n", a.len(), b.len());
    assert_eq!(service.at.exchange(chunked, chunks.as_bytes()).status, 201);
    let mut kept = service.at.connect();
    for key in ["three", "four"] {
        let body = json!({ "key": key, "payload": {} }).to_string();
        let head = format!(
            "POST /orders HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        kept.write_all((head + &body).as_bytes()).unwrap();
        let mut start = [0; 12];
        kept.read_exact(&mut start).unwrap();
        assert_eq!(&start, b"HTTP/1.1 201");
        let mut rest = Vec::new();
        while !rest.ends_with(b"}") {
            let mut byte = [0];
            kept.read_exact(&mut byte).unwrap();
            rest.push(byte[0]);
        }
    }
    assert_eq!(service.rows(), (4, 4));
}

#[test]
fn a_bad_order_is_refused_by_the_name_of_its_field() {
    let service = Service::start();
    let deep = format!("{}1{}", "[".repeat(127), "]".repeat(127));
    let cases: [(&str, String, u16, &str); 16] = [
        ("no JSON", format!("{{\"key\": {CANARY}"), 400, "body"),
        ("nothing", String::new(), 400, "body"),
        ("an array", format!("[\"{CANARY}\"]"), 400, "body"),
        (
            "no key",
            format!("{{\"payload\": {{\"a\": \"{CANARY}\"}}}}"),
            422,
            "key",
        ),
        (
            "a number for a key",
            "{\"key\": 4111, \"payload\": {}}".into(),
            422,
            "key",
        ),
        (
            "null for a key",
            "{\"key\": null, \"payload\": {}}".into(),
            422,
            "key",
        ),
        (
            "an empty key",
            "{\"key\": \"\", \"payload\": {}}".into(),
            422,
            "key",
        ),
        (
            "a long key",
            format!(
                "{{\"key\": \"{CANARY}{}\", \"payload\": {{}}}}",
                "x".repeat(200)
            ),
            422,
            "key",
        ),
        (
            "NUL in the key",
            format!("{{\"key\": \"{CANARY}\\u0000\", \"payload\": {{}}}}"),
            422,
            "key",
        ),
        (
            "no payload",
            format!("{{\"key\": \"{CANARY}\"}}"),
            422,
            "payload",
        ),
        (
            "text for a payload",
            format!("{{\"key\": \"k\", \"payload\": \"{CANARY}\"}}"),
            422,
            "payload",
        ),
        (
            "NUL in the payload",
            format!("{{\"key\": \"k\", \"payload\": {{\"a\": [\"{CANARY}\\u0000\"]}}}}"),
            422,
            "payload",
        ),
        (
            "NUL in a member's name",
            format!("{{\"key\": \"k\", \"payload\": {{\"{CANARY}\\u0000\": 1}}}}"),
            422,
            "payload",
        ),
        (
            "JSON nested too deep",
            format!("{{\"key\": \"k\", \"payload\": {{\"{CANARY}\": {deep}}}}}"),
            400,
            "body",
        ),
        (
            "a number that nothing holds",
            format!("{{\"key\": \"{CANARY}\", \"payload\": {{\"a\": 1e999}}}}"),
            400,
            "body",
        ),
        (
            "half a surrogate",
            format!("{{\"key\": \"{CANARY}\", \"payload\": {{\"a\": \"\\ud800\"}}}}"),
            400,
            "body",
        ),
    ];
    for (what, body, status, field) in cases {
        let answer = service.at.post(body.as_bytes());
        service.refuses(what, &answer, status, field);
    }
    let answer = service.at.post(b"{\"key\": \"k\xff\", \"payload\": {}}");
    service.refuses("no UTF-8", &answer, 400, "body");
}

#[test]
fn an_order_that_exists_is_refused_and_of_two_at_once_one_is_taken() {
    let service = Service::start();
    assert_eq!(service.at.order(CANARY).status, 201);
    let again = service.at.order(CANARY);
    service.refuses("a duplicate", &again, 409, "key");
    let (orders, rows) = service.rows();
    let at = service.at;
    for round in 0..10 {
        let key = format!("race {round}");
        let mut statuses: Vec<u16> = std::thread::scope(|scope| {
            let both = [(); 2].map(|()| scope.spawn(|| at.order(&key).status));
            both.map(|one| one.join().unwrap()).into()
        });
        statuses.sort_unstable();
        assert_eq!(statuses, [201, 409]);
    }
    assert_eq!(service.rows(), (orders + 10, rows + 10));
}

#[test]
fn a_body_that_is_too_large_is_refused_whatever_is_announced() {
    let service = Service::start();
    let large = json!({ "key": "k", "payload": { "a": "x".repeat(2 << 20) } }).to_string();
    let answer = service.at.post(large.as_bytes());
    service.refuses("2 MiB", &answer, 413, "body");
    // The same without saying how long it is.
    let head = "POST /orders HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n";
    let chunk = format!("{:x}\r\n{large}\r\n0\r\n\r\n", large.len());
    let answer = service.at.exchange(head, chunk.as_bytes());
    service.refuses("2 MiB in a chunk", &answer, 413, "body");
    // Refused by what is announced, and nothing is set aside for it.
    for announced in [
        "1000000000000",
        "18446744073709551615",
        "9999999999999999999999",
    ] {
        let head =
            format!("POST /orders HTTP/1.1\r\nhost: x\r\ncontent-length: {announced}\r\n\r\n{{");
        let began = Instant::now();
        let answer = service.at.exchange(&head, b"");
        assert!(
            (400..500).contains(&answer.status),
            "{announced}: {}",
            answer.text
        );
        assert!(began.elapsed() < stretched(Duration::from_secs(5)));
        assert_eq!(service.at.order(announced).status, 201);
    }
    assert!(service.memory() < 200 * 1024, "{} KiB", service.memory());
}

#[test]
fn a_request_that_is_none_is_refused_and_stops_nobody() {
    let service = Service::start();
    let (orders, rows) = service.rows();
    let answer = service.at.exchange(
        "POST /other HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n",
        b"",
    );
    service.refuses("another path", &answer, 404, "path");
    let answer = service.at.exchange(
        "PUT /orders HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n",
        b"",
    );
    service.refuses("another method", &answer, 405, "method");
    let answer = service.at.exchange(
        "POST /orders HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"",
    );
    service.refuses("no body at all", &answer, 400, "body");
    let flood = format!(
        "POST /orders HTTP/1.1\r\nhost: x\r\n{}\r\n",
        "a: b\r\n".repeat(10_000)
    );
    for (what, head) in [
        ("not HTTP", "hello\r\n\r\n".to_owned()),
        (
            "a length that is no number",
            "POST /orders HTTP/1.1\r\nhost: x\r\ncontent-length: ten\r\n\r\n".into(),
        ),
        (
            "a negative length",
            "POST /orders HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n".into(),
        ),
        ("ten thousand headers", flood),
    ] {
        let mut stream = service.at.connect();
        // It may be refused before all of it is sent.
        let _ = stream.write_all(head.as_bytes());
        let answer = read_answer(&mut stream);
        // A reset may have taken the answer with it.
        assert!(
            matches!(answer.status, 0 | 400..500),
            "{what}: {}",
            answer.text
        );
        assert_eq!(service.at.order(what).status, 201, "{what}");
    }
    assert_eq!(service.rows(), (orders + 7, rows + 7));
}

#[test]
fn a_body_that_breaks_off_writes_nothing() {
    let service = Service::start();
    let body = json!({ "key": "k", "payload": {} }).to_string();
    let mut stream = service.at.connect();
    let head = format!(
        "POST /orders HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n",
        body.len() + 10
    );
    stream.write_all((head + &body).as_bytes()).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let answer = read_answer(&mut stream);
    service.refuses("a short body", &answer, 400, "body");
    assert_eq!(service.rows(), (1, 1));
    // Fifty clients that never finish their request hold up nobody.
    let half: Vec<_> = (0..50)
        .map(|_| {
            let mut stream = service.at.connect();
            stream.write_all(b"POST /orders HTTP/1.1\r\nho").unwrap();
            stream
        })
        .collect();
    let began = Instant::now();
    assert_eq!(service.at.order("beside them").status, 201);
    assert!(began.elapsed() < stretched(Duration::from_secs(5)));
    drop(half);
    assert_eq!(service.rows(), (2, 2));
}
