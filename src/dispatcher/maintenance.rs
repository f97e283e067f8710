//! What is done now and then: lapsed claims, unknown outcomes.

use std::sync::Arc;

use crossbeam_channel::RecvTimeoutError;

use super::backend::Session;
use super::reconcile;
use super::shared::{Shared, Trouble};
use super::stats::add;
use crate::error::StoreError;

/// Claims lapsed by one statement.
const BATCH: i64 = 500;

pub(crate) fn run(shared: &Arc<Shared>) {
    let mut session = shared.backend.session("maintenance");
    let mut trouble = Trouble::new("maintenance");
    loop {
        if shared.is_stopping() {
            return;
        }
        let wait = match sweep(shared, session.as_mut()) {
            Ok(()) => {
                trouble.works();
                shared.maintenance
            }
            Err(error) => trouble.failed(error).max(shared.maintenance / 4),
        };
        if shared.closed.recv_timeout(wait) != Err(RecvTimeoutError::Timeout) {
            return;
        }
    }
}

/// One round. A claim that was not settled in time is an unknown outcome, never
/// a row to be sent again: its call may have begun.
pub(crate) fn sweep(shared: &Arc<Shared>, session: &mut dyn Session) -> Result<(), StoreError> {
    let names: Vec<String> = shared
        .lanes
        .iter()
        .map(|lane| lane.destination.name.clone())
        .collect();
    loop {
        let lapsed = session.lapse(&names, shared.foreign_lease, BATCH)?;
        add(&shared.counters.lapsed, lapsed);
        if lapsed > 0 {
            tracing::warn!(
                rows = lapsed,
                "claims have lapsed; their outcomes are unknown"
            );
        }
        if (lapsed as i64) < BATCH || shared.is_stopping() {
            break;
        }
    }
    for index in 0..shared.lanes.len() {
        reconcile::look(shared, session, index)?;
    }
    Ok(())
}
