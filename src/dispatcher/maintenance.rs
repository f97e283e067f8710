//! What is done now and then: lapsed claims, unknown outcomes.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, select};

use super::backend::Session;
use super::reconcile;
use super::shared::{Shared, Trouble};
use super::stats::add;
use super::time::from_now;
use crate::error::StoreError;

/// Claims lapsed by one statement.
const BATCH: i64 = 500;

pub(crate) fn run(shared: &Arc<Shared>, ask: &Receiver<()>) {
    let mut session = shared.session("maintenance");
    let mut trouble = Trouble::new("maintenance");
    let mut due = Instant::now();
    while !shared.is_stopping() {
        let result = if due <= Instant::now() {
            due = from_now(shared.maintenance);
            sweep(shared, &mut session)
        } else {
            ask_on(shared, &mut session, Duration::ZERO)
        };
        match result {
            Ok(()) => trouble.works(),
            Err(error) => {
                let wait = trouble.failed(error);
                due = Instant::now() + wait;
                // Reconcilers that are free do not shorten this wait.
                let _ = shared.closed.recv_timeout(wait);
            }
        }
        select! {
            recv(ask) -> _ => {},
            recv(shared.closed) -> _ => return,
            default(due.saturating_duration_since(Instant::now())) => {},
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
    ask_around(shared, session, &names)
}

/// Whether there was more to ask about than there were reconcilers free.
pub(crate) fn more_questions(shared: &Shared) -> bool {
    let mut lanes = shared.lanes.iter();
    lanes.any(|lane| lane.more_questions.load(Ordering::Acquire))
}

/// There are reconcilers free again.
pub(crate) fn ask_on(
    shared: &Arc<Shared>,
    session: &mut dyn Session,
    due_for: Duration,
) -> Result<(), StoreError> {
    for (index, lane) in shared.lanes.iter().enumerate() {
        if lane.more_questions.load(Ordering::Acquire) {
            reconcile::look(shared, session, index, due_for)?;
        }
    }
    Ok(())
}

/// One statement tells which destinations have unknown outcomes at all: there may
/// be hundreds, and normally none has any.
fn ask_around(
    shared: &Arc<Shared>,
    session: &mut dyn Session,
    names: &[String],
) -> Result<(), StoreError> {
    let unknown: HashSet<String> = session.with_unknown(names)?.into_iter().collect();
    for (index, lane) in shared.lanes.iter().enumerate() {
        if unknown.contains(&lane.destination.name) {
            reconcile::look(shared, session, index, Duration::ZERO)?;
        } else {
            lane.more_questions.store(false, Ordering::Release);
        }
    }
    Ok(())
}
