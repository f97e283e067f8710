//! A running dispatcher, and how it stops.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};

use super::shared::{Ends, Shared};
use super::stats::{DestinationState, Stats};
use super::time::{after, from_now};
use super::{claimer, lease, listener, maintenance, reconcile, settler, worker};
use crate::error::code;

const CLAIMER: &str = "claimer";
/// How long dropping the handle waits.
const DROP_DEADLINE: Duration = Duration::from_secs(5);
/// What settling and ending may take beyond the deadline of a stop.
const GRACE: Duration = Duration::from_millis(900);

/// What a stop left.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StopReport {
    /// Calls that were running and have been settled with their answer.
    pub finished: u64,
    /// Rows whose call had not begun: `pending` again, the attempt returned.
    pub handed_back: u64,
    /// Calls that still ran at the deadline: their outcome is unknown.
    pub left_unknown: u64,
    /// Threads that still hang in calls, or in the database.
    pub left_running: u64,
    /// Outcomes that could not be written before the deadline. Their claims
    /// lapse.
    pub unsettled: u64,
    /// The roles of the dispatcher's own threads that did not end in time.
    pub blocked: Vec<&'static str>,
}

/// A dispatcher at work. Dropping it stops it, waiting five seconds at most.
pub struct DispatcherHandle {
    shared: Arc<Shared>,
    stop: Mutex<Option<StopEnds>>,
    report: Mutex<StopReport>,
}

struct StopEnds {
    close: Sender<()>,
    exits: Receiver<&'static str>,
    /// The threads that are waited for.
    roles: Vec<&'static str>,
}

impl DispatcherHandle {
    /// All threads.
    pub(crate) fn start(shared: Arc<Shared>, ends: Ends) -> Self {
        let Ends { wake, ask, .. } = ends.clone();
        let mut handle = Self::start_settling(shared, ends);
        handle.spawn("maintenance", move |shared| maintenance::run(&shared, &ask));
        handle.spawn("listener", |shared| listener::keep_listening(&shared));
        handle.spawn(CLAIMER, move |shared| claimer::run(&shared, &wake));
        handle
    }

    /// Only the threads that see claimed rows through.
    pub(crate) fn start_settling(shared: Arc<Shared>, ends: Ends) -> Self {
        let reports = ends.reports;
        let mut handle = Self {
            shared,
            stop: Mutex::new(Some(StopEnds {
                close: ends.close,
                exits: ends.exits,
                roles: Vec::new(),
            })),
            report: Mutex::default(),
        };
        handle.spawn("settler", move |shared| settler::run(&shared, &reports));
        handle.spawn("keeper", |shared| lease::keep(&shared));
        handle.spawn("watchdog", |shared| worker::watch(&shared));
        handle
    }

    fn spawn(&mut self, role: &'static str, body: impl FnOnce(Arc<Shared>) + Send + 'static) {
        let stop = self.stop.get_mut().unwrap_or_else(PoisonError::into_inner);
        if self.shared.spawn(role, body)
            && let Some(ends) = stop
        {
            ends.roles.push(role);
        }
    }

    /// The id that this dispatcher's claims carry: host, process and a random
    /// part, new at each start.
    #[must_use]
    pub fn worker_id(&self) -> &str {
        &self.shared.worker_id
    }

    /// What has been done so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.shared.counters.read()
    }

    /// How each destination stands at the moment, in the order of registration.
    #[must_use]
    pub fn destinations(&self) -> Vec<DestinationState> {
        let now = Instant::now();
        self.shared
            .lanes
            .iter()
            .map(|lane| lane.state(now))
            .collect()
    }

    /// Looks for due rows now.
    pub fn nudge(&self) {
        self.shared.nudge();
    }

    /// Stops: nothing new is begun, rows that no worker has begun are handed
    /// back, running calls have until `deadline` to answer, and those that do
    /// not are settled as unknown. Returns by the deadline plus one second,
    /// whatever the database does, and says what it left.
    ///
    /// Called again it returns the first report.
    pub fn stop(&self, deadline: Duration) -> StopReport {
        let mut stop = self.stop.lock().unwrap_or_else(PoisonError::into_inner);
        let mut report = self.report.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ends) = stop.take() {
            *report = stop_within(&self.shared, ends, deadline);
        }
        report.clone()
    }
}

fn stop_within(shared: &Arc<Shared>, ends: StopEnds, deadline: Duration) -> StopReport {
    let until = from_now(deadline);
    let before = shared.counters.read();
    shared.stopping.store(true, Ordering::Release);
    shared.nudge();
    shared.hand_back_waiting();
    // What it is claiming at this moment is handed back as well, and for that the
    // settler must be there.
    let mut roles = ends.roles;
    wait_for_exits(&ends.exits, &mut roles, until, |left| {
        !left.contains(&CLAIMER)
    });
    let mut left_unknown = 0;
    if !shared.flights.wait_empty(until) {
        // The claimer may have brought rows after we emptied the channels.
        shared.hand_back_waiting();
        left_unknown = shared.give_up_calls(None, code::STOPPED).len();
        reconcile::give_up(shared, None);
        shared.flights.wait_empty(after(until, GRACE / 2));
    }
    let unsettled = shared.flights.len();
    drop(ends.close);
    let blocked = wait_for_exits(
        &ends.exits,
        &mut roles,
        after(until, GRACE),
        <[_]>::is_empty,
    );
    if !blocked.is_empty() {
        tracing::warn!(threads = ?blocked, "threads of the outbox dispatcher did not end in time");
    }
    let now = shared.counters.read();
    let settled = |s: &Stats| s.completed + s.retried + s.failed + s.unknown;
    StopReport {
        finished: (settled(&now) - settled(&before)).saturating_sub(left_unknown as u64),
        handed_back: now.handed_back - before.handed_back,
        left_unknown: left_unknown as u64,
        left_running: now.abandoned + now.abandoned_sessions + blocked.len() as u64,
        unsettled: unsettled as u64,
        blocked,
    }
}

/// Waits until `enough` of our own threads have ended, at most until then, and says
/// which have not. Workers are not waited for: those that are idle end at once, the
/// others hang in calls.
fn wait_for_exits(
    exits: &Receiver<&'static str>,
    left: &mut Vec<&'static str>,
    until: Instant,
    enough: impl Fn(&[&'static str]) -> bool,
) -> Vec<&'static str> {
    while !enough(left) {
        match exits.recv_deadline(until) {
            Ok(ended) => left.retain(|role| *role != ended),
            Err(_) => break,
        }
    }
    left.clone()
}

impl Drop for DispatcherHandle {
    fn drop(&mut self) {
        self.stop(DROP_DEADLINE);
    }
}

impl fmt::Debug for DispatcherHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DispatcherHandle")
            .field("worker_id", &self.shared.worker_id)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}
