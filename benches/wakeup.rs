//! What waking an idle dispatcher costs, and whom: `make bench-wakeup`.
//!
//! Everything is measured in one run, on the embedded default with `fsync` on; the
//! ratio compares rounds that take turns. The last line is
//! `wakeup: p50_ms=… p99_ms=… idle_statements_s=… enqueue_ratio=…`.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout
)]
#![allow(dead_code, unreachable_pub)]

#[path = "../tests/support/proxy.rs"]
mod proxy;
#[path = "../tests/support/server/mod.rs"]
mod server;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel_outbox::{Destination, Dispatched, Dispatcher, OutboxEntry, enqueue, migrations};
use proxy::Proxy;
use serde_json::json;
use server::Server;

/// Rows of the latency, ten milliseconds apart.
const ROWS: usize = 1_000;
const IDLE: Duration = Duration::from_secs(10);
const WRITERS: usize = 8;
/// Each kind of round is run this often, in turns.
const ROUNDS: usize = 5;
const ROUND: Duration = Duration::from_secs(4);

fn main() {
    let server = Server::builder()
        .durable()
        .setting("max_wal_size", "4GB")
        .launch()
        .expect("a private server");
    let url = server.url("postgres");
    let mut conn = PgConnection::establish(&url).unwrap();
    migrations::run(&mut conn).unwrap();

    let (statements, processor) = idle(&server, &url);
    println!("idle for {IDLE:?}: {statements:.2} statements a second, {processor:.2}% of a core");
    let mut waits = latency(&mut conn, &url);
    waits.sort_unstable();
    let of = |share: f64| waits[((waits.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e3;
    let (p50, p99) = (of(0.5), of(0.99));
    println!("{ROWS} rows at 100 a second, commit to begun: p50 {p50:.2} ms, p99 {p99:.2} ms");
    let ratio = enqueue_ratio(&mut conn, &url);
    println!(
        "wakeup: p50_ms={p50:.2} p99_ms={p99:.2} idle_statements_s={statements:.2} enqueue_ratio={ratio:.3}"
    );
}

fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(
        time.tv_sec.unsigned_abs(),
        u32::try_from(time.tv_nsec).unwrap(),
    )
}

/// Statements a second and per cent of a core of a dispatcher with nothing to do.
fn idle(server: &Server, url: &str) -> (f64, f64) {
    let proxy = Proxy::to(server.port());
    let running = Dispatcher::builder(&proxy.url(url))
        .destination(Destination::idempotent("nobody", |_: &OutboxEntry| {
            Dispatched::completed()
        }))
        .start()
        .unwrap();
    // It falls asleep first.
    std::thread::sleep(Duration::from_secs(2));
    let (asked, used, begun) = (proxy.statements(), processor_time(), Instant::now());
    std::thread::sleep(IDLE);
    let seconds = begun.elapsed().as_secs_f64();
    let statements = (proxy.statements() - asked) as f64 / seconds;
    let processor = (processor_time() - used).as_secs_f64() / seconds * 100.0;
    running.stop(Duration::from_secs(5));
    (statements, processor)
}

/// From a row's commit to its begin, by an idle dispatcher.
fn latency(conn: &mut PgConnection, url: &str) -> Vec<Duration> {
    let begun: Arc<Mutex<Vec<Option<Instant>>>> = Arc::new(Mutex::new(vec![None; ROWS]));
    let seen = Arc::clone(&begun);
    let send = move |entry: &OutboxEntry| {
        let i = entry.payload["i"].as_u64().unwrap() as usize;
        seen.lock().unwrap()[i] = Some(Instant::now());
        Dispatched::completed()
    };
    let running = Dispatcher::builder(url)
        .destination(Destination::idempotent("latency", send))
        .start()
        .unwrap();
    std::thread::sleep(Duration::from_secs(2));
    let start = Instant::now();
    let committed: Vec<Instant> = (0..ROWS)
        .map(|i| {
            let due = start + Duration::from_millis(10) * i as u32;
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            let entry = OutboxEntry::new("latency", format!("k{i}"), &json!({ "i": i })).unwrap();
            enqueue(conn, &entry).unwrap();
            Instant::now()
        })
        .collect();
    while begun.lock().unwrap().iter().any(Option::is_none) {
        std::thread::sleep(Duration::from_millis(10));
    }
    running.stop(Duration::from_secs(5));
    let begun = begun.lock().unwrap();
    let waits = committed.iter().zip(begun.iter());
    waits
        .map(|(committed, begun)| begun.unwrap().saturating_duration_since(*committed))
        .collect()
}

/// Rows a second of writers that commit one row a transaction, with wake-ups on, by
/// the same with them off, beside a busy dispatcher and an idle one.
fn enqueue_ratio(conn: &mut PgConnection, url: &str) -> f64 {
    let start = |destination: &str| {
        Dispatcher::builder(url)
            .destination(Destination::idempotent(destination, |_: &OutboxEntry| {
                Dispatched::completed()
            }))
            .start()
            .unwrap()
    };
    let (busy, idle) = (start("busy"), start("idle"));
    let mut rates = [Vec::new(), Vec::new()];
    for round in 0..2 * ROUNDS {
        // On, off, off, on: what drifts does not favour either.
        let on = [true, false, false, true][round % 4];
        let state = if on { "ENABLE" } else { "DISABLE" };
        conn.batch_execute(&format!(
            "TRUNCATE tf_outbox; ALTER TABLE tf_outbox {state} TRIGGER tf_outbox_wakeup; CHECKPOINT"
        ))
        .unwrap();
        let rate = enqueue_rate(url, round);
        println!(
            "wake-ups {}: {rate:.0} rows a second",
            if on { "on " } else { "off" }
        );
        rates[usize::from(on)].push(rate);
    }
    busy.stop(Duration::from_secs(5));
    idle.stop(Duration::from_secs(5));
    let [off, on] = rates.map(|mut rates| {
        rates.sort_unstable_by(f64::total_cmp);
        rates[rates.len() / 2]
    });
    on / off
}

fn enqueue_rate(url: &str, round: usize) -> f64 {
    let (over, written) = (AtomicBool::new(false), AtomicUsize::new(0));
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (over, written) = (&over, &written);
            scope.spawn(move || {
                let mut conn = PgConnection::establish(url).unwrap();
                let mut i = 0;
                while !over.load(Ordering::Relaxed) {
                    let key = format!("{round}-{writer}-{i}");
                    let entry = OutboxEntry::new("busy", key, &json!({ "i": i })).unwrap();
                    enqueue(&mut conn, &entry).unwrap();
                    written.fetch_add(1, Ordering::Relaxed);
                    i += 1;
                }
            });
        }
        std::thread::sleep(ROUND);
        over.store(true, Ordering::Relaxed);
    });
    written.load(Ordering::Relaxed) as f64 / begun.elapsed().as_secs_f64()
}
