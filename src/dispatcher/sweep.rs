//! One sweep in the calling thread.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::backend::Session;
use super::handle::DispatcherHandle;
use super::shared::{Ends, Shared};
use super::stats::Stats;
use super::{claimer, maintenance};
use crate::error::StoreError;

/// How often to see whether there is room again.
const LOOK: Duration = Duration::from_millis(10);

/// Lapsed claims, unknown outcomes, and every row that is due; returns when all
/// of them are settled.
pub(crate) fn run(shared: Arc<Shared>, ends: Ends) -> Result<Stats, StoreError> {
    let handle = DispatcherHandle::start_settling(Arc::clone(&shared), ends);
    let mut session = shared.backend.session("sweep");
    let swept = sweep(&shared, session.as_mut());
    // What was claimed is seen through even where the sweep broke off.
    let patience = patience(&shared);
    shared.flights.wait_empty(Instant::now() + patience);
    wait_for_reconcilers(&shared, Instant::now() + patience);
    handle.stop(Duration::from_secs(1));
    swept.map(|()| handle.stats())
}

fn sweep(shared: &Arc<Shared>, session: &mut dyn Session) -> Result<(), StoreError> {
    maintenance::sweep(shared, session)?;
    while claimer::look(shared, session)?.full {
        let held = shared.flights.len();
        shared
            .flights
            .wait_at_most(held.saturating_sub(1), Instant::now() + LOOK);
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

fn wait_for_reconcilers(shared: &Shared, deadline: Instant) {
    let busy = || {
        shared
            .lanes
            .iter()
            .any(|lane| lane.reconcilers.load(Ordering::Acquire) > 0)
    };
    while busy() && shared.closed.recv_timeout(LOOK).is_err() && Instant::now() < deadline {}
}
