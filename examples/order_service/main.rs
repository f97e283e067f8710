//! An order service whose effects survive a crash.
//!
//! ```sh
//! cargo run --example order_service --features migrations -- demo [--orders FILE]
//! cargo run --example order_service --features migrations -- serve
//! ```
//!
//! | file | process | story |
//! |---|---|---|
//! | `service` | order service | `POST /orders` writes order and outbox row in one transaction |
//! | `dispatch` | two dispatchers | calls the payment provider, asks it about lost answers |
//! | `receiver` | payment provider | keeps a ledger, and misbehaves on purpose |
//! | `client` | client | posts the orders |
//! | `check` | checker | counts effects in the ledger's file |
//! | `demo` | this one | starts the others, kills one, waits |
#![allow(clippy::print_stdout)]

mod check;
mod client;
mod database;
mod demo;
mod dispatch;
mod fault;
mod orders;
mod receiver;
#[path = "../../tests/support/server/mod.rs"]
mod server;
mod service;

use std::process::ExitCode;

/// What any part of the demo may fail with.
type Outcome<T = ()> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

const USAGE: &str = "usage: order_service demo [--orders FILE]   run the whole story, and check it
       order_service serve                   leave the service running, for curl
       (DATABASE_URL: the server to use; a private one is started where it is not set)";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["demo"] => demo::run(None),
        ["demo", "--orders", path] => demo::run(Some(path)),
        ["serve"] => demo::serve(),
        // The other processes, started by this one.
        ["role", "receiver", ledger] => receiver::run(ledger),
        ["role", "service", url] => service::run(url),
        ["role", "dispatcher", url, remote] => dispatch::run(url, remote),
        ["role", "client", service, path] => client::run(service, path),
        ["role", "check", url, ledger, path, faults] => check::run(url, ledger, path, faults),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("order_service: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Ends this process when the one that started it is gone, however it went: the
/// pipe that is our standard input then closes.
fn end_with_parent(before: impl FnOnce() + Send + 'static) {
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        before();
        std::process::exit(0);
    });
}
