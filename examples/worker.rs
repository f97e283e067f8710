//! A dispatcher as a process of its own: runs a command for each row of one
//! destination, until SIGTERM or SIGINT tells it to end.
//!
//! ```sh
//! DATABASE_URL=postgres://localhost/shop \
//!     cargo run --example worker -- mail sendmail -t
//! ```
//!
//! The payload goes to the command's standard input, the idempotency key into its
//! environment. It answers with its exit status: 0, done; 75 (`EX_TEMPFAIL` of
//! sysexits.h), not now; any other, never. If a signal ends it, nobody knows. Only
//! a command that honours `IDEMPOTENCY_KEY` may be called again then, and that one
//! is asked for by `OUTBOX_KIND=idempotent`; else the row waits for a person.

#![allow(clippy::print_stdout)]

use std::error::Error;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use diesel_outbox::{Destination, Dispatched, Dispatcher, OutboxEntry};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// What calls in progress may take once we are told to end.
const GRACE: Duration = Duration::from_secs(20);

fn call(command: &[String], entry: &OutboxEntry) -> Dispatched {
    let started = Command::new(&command[0])
        .args(&command[1..])
        .env("IDEMPOTENCY_KEY", &entry.idempotency_key)
        .stdin(Stdio::piped())
        // A Ctrl-C is for us, and not for what we have begun.
        .process_group(0)
        .spawn();
    let Ok(mut child) = started else {
        return Dispatched::retryable("worker.not_started");
    };
    if let Some(mut stdin) = child.stdin.take() {
        // A command that does not read it may be right not to.
        let _ = stdin.write_all(entry.payload.to_string().as_bytes());
    }
    match child.wait().map(|status| status.code()) {
        Ok(Some(0)) => Dispatched::completed(),
        Ok(Some(75)) => Dispatched::retryable("worker.tempfail"),
        Ok(Some(_)) => Dispatched::permanent("worker.refused"),
        Ok(None) | Err(_) => Dispatched::unknown(),
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let name = arguments
        .next()
        .ok_or("usage: worker DESTINATION COMMAND…")?;
    let command: Vec<String> = arguments.collect();
    if command.is_empty() {
        return Err("usage: worker DESTINATION COMMAND…".into());
    }
    let send = move |entry: &OutboxEntry| call(&command, entry);
    let destination = match std::env::var("OUTBOX_KIND").as_deref() {
        Ok("idempotent") => Destination::idempotent(name, send),
        _ => Destination::manual(name, send),
    };
    let mut builder = Dispatcher::builder(&std::env::var("DATABASE_URL")?).destination(destination);
    if let Ok(seconds) = std::env::var("OUTBOX_LEASE_SECONDS") {
        builder = builder.with_lease(Duration::from_secs(seconds.parse()?));
    }
    // Before anything is begun: a signal that comes now must not end us half-way.
    let mut signals = Signals::new([SIGTERM, SIGINT])?;
    let dispatcher = builder.start()?;
    println!("working as {}", dispatcher.worker_id());
    signals.forever().next();
    let report = dispatcher.stop(GRACE);
    println!("{report:?}");
    Ok(())
}
