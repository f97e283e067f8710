//! Renewing the leases of what is in hand.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crossbeam_channel::RecvTimeoutError;

use super::backend::Session;
use super::shared::{Shared, Trouble};
use super::time::from_now;

/// Claims of one renewal statement.
const CHUNK: usize = 1000;

/// Renews each third of a lease; after a failure as soon as it is sensible. A
/// process that cannot renew does not claim.
pub(crate) fn keep(shared: &Arc<Shared>) {
    let mut session = shared.session("keeper");
    let mut trouble = Trouble::new("keeper");
    let mut wait = shared.lease / 3;
    while shared.closed.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
        let fences = shared.flights.fences();
        // With nothing in hand there is nothing to ask, unless to learn whether
        // it works again.
        if fences.is_empty() && shared.renewing.load(Ordering::Acquire) {
            continue;
        }
        let mut result = Ok(());
        for chunk in fences
            .chunks(CHUNK)
            .chain(fences.is_empty().then_some(&[][..]))
        {
            let until = from_now(shared.lease);
            match session.renew(&shared.worker_id, chunk, shared.lease) {
                Ok(renewed) => shared.flights.renewed(&renewed, until),
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        match result {
            Ok(()) => {
                trouble.works();
                wait = shared.lease / 3;
                if !shared.renewing.swap(true, Ordering::AcqRel) {
                    shared.nudge();
                }
            }
            Err(error) => {
                shared.renewing.store(false, Ordering::Release);
                wait = trouble.failed(error).min(shared.lease / 6);
            }
        }
    }
}
