//! The dispatcher, and how it calls the payment provider: the part to copy.

use std::io::{ErrorKind, Write};
use std::sync::Arc;
use std::time::Duration;

use diesel_outbox::{
    Backoff, Destination, Dispatched, Dispatcher, DispatcherHandle, OutboxEntry, OutboxRecord,
    Reconciled,
};
use serde_json::json;

use crate::{Outcome, end_with_parent};

/// How long the client of a call waits, in seconds: below `send_timeout`.
const CALL_SECONDS: u64 = 1;

/// Charges, and says honestly how it ended.
fn charge(remote: &str, entry: &OutboxEntry) -> Dispatched {
    let answer = minreq::post(format!("{remote}/charges"))
        .with_header("idempotency-key", &entry.idempotency_key)
        .with_header("content-type", "application/json")
        .with_body(entry.payload.to_string())
        .with_timeout(CALL_SECONDS)
        .send();
    match answer {
        Ok(response) => match response.status_code {
            200..=299 => Dispatched::completed(),
            503 | 429 => Dispatched::retryable("provider.busy"),
            400..=499 => Dispatched::permanent("provider.refused"),
            // It may have done its work before it failed.
            _ => Dispatched::unknown(),
        },
        // Nothing left this host.
        Err(minreq::Error::IoError(error)) if error.kind() == ErrorKind::ConnectionRefused => {
            Dispatched::retryable("provider.down")
        }
        // The request may have arrived.
        Err(_) => Dispatched::unknown(),
    }
}

/// Asks what became of a charge. The provider applies a request while it reads
/// it, so one that it does not know after `settle_delay` never arrived.
fn ask(remote: &str, record: &OutboxRecord) -> Reconciled {
    let key = &record.entry.idempotency_key;
    let answer = minreq::get(format!("{remote}/charges/{key}"))
        .with_timeout(CALL_SECONDS)
        .send();
    match answer.map(|response| response.status_code) {
        Ok(200) => Reconciled::Completed,
        Ok(404) => Reconciled::Resend,
        _ => Reconciled::Unresolved,
    }
}

fn start(url: &str, remote: &str) -> Outcome<DispatcherHandle> {
    let (to, at) = (remote.to_owned(), remote.to_owned());
    let payments = Destination::reconciled(
        "payments",
        move |entry: &OutboxEntry| charge(&to, entry),
        move |record: &OutboxRecord| ask(&at, record),
    )
    .with_concurrency(16)
    .with_send_timeout(Duration::from_secs(2 * CALL_SECONDS))
    .with_backoff(Backoff::exponential(
        Duration::from_millis(200),
        Duration::from_secs(5),
    ))
    .with_probe_backoff(Backoff::exponential(
        Duration::from_millis(200),
        Duration::from_secs(2),
    ));
    // A short lease, so that the demo does not wait a minute for the dead.
    Ok(Dispatcher::builder(url)
        .destination(payments)
        .with_lease(Duration::from_secs(3))
        .with_maintenance_interval(Duration::from_millis(500))
        .start()?)
}

/// Runs until the parent is gone, saying now and then what it has done.
pub(crate) fn run(url: &str, remote: &str) -> Outcome {
    let dispatcher = Arc::new(start(url, remote)?);
    let stopping = Arc::clone(&dispatcher);
    end_with_parent(move || {
        stopping.stop(Duration::from_secs(3));
    });
    println!("worker {}", dispatcher.worker_id());
    loop {
        let stats = dispatcher.stats();
        let line = json!({
            "lapsed": stats.lapsed,
            "probes": stats.probes,
            "reconciled": stats.reconciled,
            "resent": stats.resent,
            "late_answers": stats.late_answers,
        });
        if writeln!(std::io::stdout(), "stats {line}").is_err() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
