//! The payment provider: applies every request that it gets, recognises none of
//! them, and misbehaves on purpose. Whatever is charged twice stands in its
//! ledger twice.

use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::fault::{self, Fault};
use crate::{Outcome, end_with_parent};

/// Longer than a caller waits.
const LATE: Duration = Duration::from_millis(1_600);
const MAX_REQUEST: usize = 4 << 20;

struct Provider {
    file: Mutex<File>,
    charged: Mutex<HashSet<String>>,
    requests: Mutex<HashMap<String, usize>>,
}

struct Call {
    method: String,
    path: String,
    key: String,
    body: Vec<u8>,
}

pub(crate) fn run(ledger: &str) -> Outcome {
    end_with_parent(|| {});
    let provider = Arc::new(Provider {
        file: Mutex::new(OpenOptions::new().create(true).append(true).open(ledger)?),
        charged: Mutex::default(),
        requests: Mutex::default(),
    });
    let listener = TcpListener::bind("127.0.0.1:0")?;
    println!("port {}", listener.local_addr()?.port());
    for stream in listener.incoming() {
        let (stream, provider) = (stream?, Arc::clone(&provider));
        thread::spawn(move || provider.answer(stream));
    }
    Ok(())
}

impl Provider {
    fn answer(&self, mut stream: TcpStream) {
        let Ok(Some(call)) = read(&mut stream) else {
            return;
        };
        match (call.method.as_str(), call.path.strip_prefix("/charges/")) {
            ("GET", Some(key)) => {
                let known = locked(&self.charged).contains(key);
                respond(&mut stream, if known { 200 } else { 404 });
            }
            ("POST", _) if call.path == "/charges" => self.charge(stream, &call),
            _ => respond(&mut stream, 404),
        }
    }

    fn charge(&self, mut stream: TcpStream, call: &Call) {
        let first = {
            let mut requests = locked(&self.requests);
            let n = requests.entry(call.key.clone()).or_default();
            *n += 1;
            *n == 1
        };
        let fault = fault::of(&call.key).filter(|_| first);
        if let Some(fault) = fault {
            self.write(&json!({ "fault": fault.name() }));
        }
        match fault {
            Some(Fault::Refuse) => respond(&mut stream, 503),
            Some(Fault::ResetBefore) => reset(&stream),
            Some(Fault::ResetAfterEffect) => {
                self.apply(call);
                reset(&stream);
            }
            Some(Fault::Late) => {
                self.apply(call);
                thread::sleep(LATE);
                respond(&mut stream, 200);
            }
            None => {
                self.apply(call);
                respond(&mut stream, 200);
            }
        }
    }

    /// The effect: durable before it is confirmed.
    fn apply(&self, call: &Call) {
        let payload: Value = serde_json::from_slice(&call.body).unwrap_or(Value::Null);
        let at = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_micros();
        self.write(&json!({ "key": call.key, "at": at as u64, "payload": payload }));
        locked(&self.charged).insert(call.key.clone());
    }

    fn write(&self, line: &Value) {
        let mut file = locked(&self.file);
        let written = writeln!(file, "{line}").and_then(|()| file.sync_data());
        if let Err(error) = written {
            eprintln!("receiver: the ledger cannot be written: {error}");
            std::process::exit(1);
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One request; `None` where it makes no sense.
fn read(stream: &mut TcpStream) -> io::Result<Option<Call>> {
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    let mut bytes = Vec::new();
    let mut chunk = [0; 16 * 1024];
    loop {
        let n = stream.read(&mut chunk)?;
        if n == 0 || bytes.len() + n > MAX_REQUEST {
            return Ok(None);
        }
        bytes.extend_from_slice(&chunk[..n]);
        let mut headers = [httparse::EMPTY_HEADER; 32];
        let mut request = httparse::Request::new(&mut headers);
        let Ok(status) = request.parse(&bytes) else {
            return Ok(None);
        };
        let httparse::Status::Complete(start) = status else {
            continue;
        };
        let header = |name: &str| {
            request
                .headers
                .iter()
                .find(|header| header.name.eq_ignore_ascii_case(name))
                .map(|header| String::from_utf8_lossy(header.value).into_owned())
        };
        let length: usize = header("content-length")
            .and_then(|value| value.parse().ok())
            .unwrap_or(0);
        if bytes.len() < start + length {
            continue;
        }
        return Ok(Some(Call {
            method: request.method.unwrap_or_default().to_owned(),
            path: request.path.unwrap_or_default().to_owned(),
            key: header("idempotency-key").unwrap_or_default(),
            body: bytes[start..start + length].to_vec(),
        }));
    }
}

fn respond(stream: &mut TcpStream, status: u16) {
    // The caller may have given up.
    let _ = write!(
        stream,
        "HTTP/1.1 {status} \r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    );
}

/// Closes with a reset: the caller cannot tell what became of its request.
fn reset(stream: &TcpStream) {
    let _ = socket2::SockRef::from(stream).set_linger(Some(Duration::ZERO));
}
