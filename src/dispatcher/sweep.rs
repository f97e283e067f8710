//! One sweep in the calling thread.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;

use super::backend::Session;
use super::claimer::Claimer;
use super::handle::DispatcherHandle;
use super::maintenance;
use super::shared::{Ends, Shared};
use super::stats::Stats;
use super::time::from_now;
use crate::error::StoreError;

/// How often to see whether there is room again.
const LOOK: Duration = Duration::from_millis(10);

/// Lapsed claims, unknown outcomes, and every row that is due; returns when all
/// of them are settled.
pub(crate) fn run(shared: Arc<Shared>, ends: Ends) -> Result<Stats, StoreError> {
    let ask = ends.ask.clone();
    let handle = DispatcherHandle::start_settling(Arc::clone(&shared), ends);
    let mut session = shared.session("sweep");
    let swept = sweep(&shared, &mut session, &ask);
    // What was claimed is seen through even where the sweep broke off.
    shared.flights.wait_empty(from_now(patience(&shared)));
    handle.stop(Duration::from_secs(1));
    swept.map(|()| handle.stats())
}

fn sweep(
    shared: &Arc<Shared>,
    session: &mut dyn Session,
    ask: &Receiver<()>,
) -> Result<(), StoreError> {
    let begun = Instant::now();
    maintenance::sweep(shared, session)?;
    while maintenance::more_questions(shared) {
        // Whoever hangs is given up in time, so that this is said some day.
        let _ = ask.recv();
        // Each row is asked about once.
        maintenance::ask_on(shared, session, begun.elapsed())?;
    }
    let mut claimer = Claimer::new(shared, session);
    while claimer.look()?.full {
        match shared.flights.len() {
            // A token is waited for, or what another dispatcher holds.
            0 => std::thread::sleep(LOOK),
            held => {
                shared.flights.wait_at_most(held - 1, Instant::now() + LOOK);
            }
        }
    }
    Ok(())
}

/// A call ends with its timeout, and an outcome that cannot be written with its
/// lease.
fn patience(shared: &Shared) -> Duration {
    shared
        .lanes
        .iter()
        .map(|lane| lane.destination.send_timeout)
        .max()
        .unwrap_or_default()
        .saturating_add(shared.lease)
        .min(Duration::from_secs(86_400))
}
