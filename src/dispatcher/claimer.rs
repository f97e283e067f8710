//! Claiming rows for free workers.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, select};

use super::backend::{Claim, Outcome, Session};
use super::shared::{Shared, Trouble};
use super::stats::add;
use super::worker::ensure_workers;
use crate::error::StoreError;

/// What a look at all destinations found.
pub(crate) struct Look {
    /// There may be more than was claimed, and room for it.
    pub(crate) more: bool,
    /// There may be more, whether or not there is room for it.
    pub(crate) full: bool,
    /// When the next row falls due that is not due yet.
    next_due: Option<Duration>,
}

pub(crate) fn run(shared: &Arc<Shared>, wake: &Receiver<()>) {
    let mut session = shared.backend.session("claimer");
    let mut trouble = Trouble::new("claimer");
    while !shared.is_stopping() {
        let wait = match look(shared, session.as_mut()) {
            Ok(Look { more: true, .. }) => {
                trouble.works();
                continue;
            }
            Ok(Look { next_due, .. }) => {
                trouble.works();
                next_due.map_or(shared.poll, |due| due.min(shared.poll))
            }
            Err(error) => {
                // Not cut short by a nudge: those come in plenty while the
                // database is away.
                let wait = trouble.failed(error);
                let _ = shared.closed.recv_timeout(wait);
                continue;
            }
        };
        select! {
            recv(wake) -> _ => {},
            recv(shared.closed) -> _ => return,
            default(wait) => {},
        }
    }
}

/// Claims what there is room for, destination by destination.
pub(crate) fn look(shared: &Arc<Shared>, session: &mut dyn Session) -> Result<Look, StoreError> {
    let mut found = Look {
        more: false,
        full: false,
        next_due: None,
    };
    // Without leases that last, a claim is an unknown outcome in the making.
    if !shared.renewing.load(Ordering::Acquire) {
        return Ok(found);
    }
    for (index, lane) in shared.lanes.iter().enumerate() {
        let free = lane.free(shared.batch);
        if free == 0 || shared.is_stopping() {
            found.full = true;
            continue;
        }
        let lease_until = Instant::now() + shared.lease;
        let claimed = session.claim(&Claim {
            destination: &lane.destination.name,
            limit: free,
            worker_id: &shared.worker_id,
            lease: shared.lease,
            max_attempts: lane.destination.max_attempts,
        })?;
        add(&shared.counters.claimed, claimed.found());
        add(&shared.counters.failed, claimed.corrupt + claimed.exhausted);
        if claimed.corrupt > 0 {
            tracing::warn!(
                rows = claimed.corrupt,
                "rows that cannot be decoded are failed"
            );
        }
        if claimed.found() == free {
            found.full = true;
            found.more |= lane.free(shared.batch) > claimed.rows.len();
        } else if let Some(due) = session.next_due(&lane.destination.name)? {
            found.next_due = Some(found.next_due.map_or(due, |next| next.min(due)));
        }
        shared.flights.add(
            index,
            lease_until,
            claimed.rows.iter().map(|(fence, _)| *fence),
        );
        lane.outstanding
            .fetch_add(claimed.rows.len(), Ordering::AcqRel);
        for (fence, entry) in claimed.rows {
            // The channel holds all that may be claimed, so this never waits.
            if shared.is_stopping() || lane.jobs.0.try_send((fence, entry)).is_err() {
                shared.settle(index, fence, Outcome::GiveBack);
            }
        }
        ensure_workers(shared, index);
    }
    Ok(found)
}
