//! Claiming rows for free workers.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, select};

use super::backend::{Claim, Claimed, Keys, Outcome, Session, Settlement, Verdict};
use super::bell::{Found, UNHEARD};
use super::lane::{Lane, Room};
use super::shared::{Shared, Trouble};
use super::stats::add;
use super::time::{after, from_now};
use super::worker::ensure_workers;
use crate::backoff;
use crate::error::StoreError;

/// What is due and keyed waits for an earlier row of its key. Whatever ends that
/// one may tell nobody (another implementation, an operator), so this bounds the
/// wait.
const BLOCKED: Duration = Duration::from_millis(250);
/// A look at blocked keys is not repeated sooner, unless a row of a key was
/// settled here.
const BLOCKED_LOOK: Duration = Duration::from_millis(10);
/// How often to look for claims whose answer was lost, while there may be any.
const ORPHANS: Duration = Duration::from_secs(1);
/// Tokens of a rate are not waited for one by one when they come fast.
const TOKENS: Duration = Duration::from_millis(5);
/// Another dispatcher was looking: it is done within this range of waits.
const BUSY: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(5)];

/// What a look at all destinations found.
#[derive(Debug)]
pub(crate) struct Look {
    /// There may be more than was claimed, and room for it.
    pub(crate) more: bool,
    /// There may be more, whether or not there is room for it.
    pub(crate) full: bool,
    /// Rows were claimed, or there is no room for any.
    busy: bool,
    /// When to look again if nothing is heard.
    wait: Duration,
}

impl Look {
    /// What counts for sleeping: a destination without room is no reason to hear
    /// nothing of the others.
    fn found(&self) -> Found {
        match self.busy {
            true => Found::Something,
            false => Found::Nothing,
        }
    }

    /// Nothing is claimed for a destination.
    fn without_room(&mut self, room: Room) {
        match room {
            Room::For(_) => {}
            Room::Full => self.full = true,
            Room::Later(wait) => {
                self.full = true;
                self.within(wait.max(TOKENS));
            }
            Room::Paused(Some(wait)) => self.within(wait),
            Room::Paused(None) => {}
        }
    }

    fn within(&mut self, wait: Duration) {
        self.wait = self.wait.min(wait);
    }
}

/// What is remembered from look to look of one destination's keyed rows: hints.
#[derive(Debug, Default)]
struct KeyedHints {
    cursor: String,
    /// When all that was due was blocked.
    blocked_at: Option<Instant>,
    /// Whether keyed rows have the first choice of the free slots.
    first: bool,
}

/// Claims for the destinations that have free slots.
pub(crate) struct Claimer<'a> {
    shared: &'a Arc<Shared>,
    session: &'a mut dyn Session,
    keyed: Vec<KeyedHints>,
    /// Claims may have been taken that we do not know of.
    suspicion: Option<Suspicion>,
}

/// An answer to a claim was lost or late.
#[derive(Debug, Clone, Copy)]
struct Suspicion {
    /// By then every such claim has lapsed.
    until: Instant,
    /// When to look for them next.
    next: Instant,
}

pub(crate) fn run(shared: &Arc<Shared>, wake: &Receiver<()>) {
    let mut session = shared.session("claimer");
    let mut claimer = Claimer::new(shared, &mut session);
    let mut trouble = Trouble::new("claimer");
    while !shared.is_stopping() {
        let ticket = shared.bell.ticket();
        let wait = match claimer.look() {
            Ok(look) => {
                trouble.works();
                shared.bell.looked(ticket, look.found());
                if look.more {
                    continue;
                }
                look.wait
            }
            Err(error) => {
                // Not cut short by a nudge: those come in plenty while the
                // database is away.
                let wait = trouble.failed(error);
                let _ = shared.closed.recv_timeout(wait);
                continue;
            }
        };
        if rest(shared, wake, wait) == Rested::Closed {
            return;
        }
    }
}

#[derive(PartialEq, Eq)]
enum Rested {
    Enough,
    Closed,
}

/// Waits until there may be work: for `wait` at most, and for as long as whoever
/// listens answers for it.
fn rest(shared: &Shared, wake: &Receiver<()>, wait: Duration) -> Rested {
    let begun = Instant::now();
    loop {
        let left = wait.min(shared.bell.rest()).saturating_sub(begun.elapsed());
        if left.is_zero() {
            return Rested::Enough;
        }
        select! {
            recv(wake) -> _ => return Rested::Enough,
            recv(shared.closed) -> _ => return Rested::Closed,
            // The listener may go deaf meanwhile.
            default(left.min(UNHEARD)) => {},
        }
    }
}

impl<'a> Claimer<'a> {
    pub(crate) fn new(shared: &'a Arc<Shared>, session: &'a mut dyn Session) -> Self {
        let keyed = shared.lanes.iter().map(|_| KeyedHints::default()).collect();
        Self {
            shared,
            session,
            keyed,
            suspicion: None,
        }
    }

    /// Claims what there is room for, and finds what a lost answer left behind.
    pub(crate) fn look(&mut self) -> Result<Look, StoreError> {
        let result = self.hand_back_orphans().and_then(|()| self.claim_for_all());
        if result.is_err() {
            let now = Instant::now();
            self.suspicion = Some(Suspicion {
                until: after(now, self.shared.lease.saturating_mul(2)),
                next: now,
            });
        }
        result
    }

    /// A claim whose answer did not reach us may have been committed, now or when a
    /// frozen server goes on. What the store holds as ours and we have never had in
    /// hand was never begun, and is handed back.
    ///
    /// This thread is the only one that claims, so whatever is held and was known
    /// neither before nor since is such a row.
    fn hand_back_orphans(&mut self) -> Result<(), StoreError> {
        let now = Instant::now();
        let Some(suspicion) = self.suspicion.filter(|s| s.next <= now) else {
            return Ok(());
        };
        let shared = self.shared;
        let known = shared.flights.known();
        let held = self.session.held(&shared.worker_id)?;
        shared.flights.forget_let_go(&held);
        let orphans: Vec<Settlement> = held
            .into_iter()
            .filter(|fence| !known.contains(&fence.seq))
            .map(|fence| Settlement {
                fence,
                outcome: Outcome::GiveBack,
            })
            .collect();
        if !orphans.is_empty() {
            tracing::warn!(
                rows = orphans.len(),
                "claims whose answer was lost are handed back"
            );
            let verdicts = self.session.settle(&shared.worker_id, &orphans)?;
            let settled = verdicts.iter().filter(|v| **v == Verdict::Settled).count();
            add(&shared.counters.orphans, settled);
        }
        self.suspicion = (suspicion.until > now).then_some(Suspicion {
            next: now + ORPHANS,
            ..suspicion
        });
        Ok(())
    }

    /// One statement tells which destinations have something due, and a claim
    /// follows only for those.
    fn claim_for_all(&mut self) -> Result<Look, StoreError> {
        let shared = self.shared;
        let mut found = Look {
            more: false,
            full: false,
            busy: false,
            wait: shared.poll,
        };
        if let Some(suspicion) = self.suspicion {
            found.within(suspicion.next.saturating_duration_since(Instant::now()));
        }
        // Without leases that last, a claim is an unknown outcome in the making.
        if !shared.renewing.load(Ordering::Acquire) {
            return Ok(found);
        }
        let now = Instant::now();
        // Those that wait for a token are asked about too: only if something is due
        // is there anything to wait for.
        let mut open: Vec<(usize, &Lane, Room)> = Vec::with_capacity(shared.lanes.len());
        for (index, lane) in shared.lanes.iter().enumerate() {
            match lane.room(shared.batch, now) {
                room @ (Room::For(_) | Room::Later(_)) => open.push((index, lane, room)),
                room => found.without_room(room),
            }
        }
        if open.is_empty() {
            found.busy = true;
            return Ok(found);
        }
        let names: Vec<String> = open
            .iter()
            .map(|(_, lane, _)| lane.destination.name.clone())
            .collect();
        let due = self.session.due(&names)?;
        if let Some(next) = due.next {
            found.within(next);
        }
        let ready: HashSet<&str> = due.ready.iter().map(String::as_str).collect();
        let keyed: HashSet<&str> = due.keyed.iter().map(String::as_str).collect();
        for (index, lane, room) in open {
            let name = lane.destination.name.as_str();
            let (is_ready, is_keyed) = (ready.contains(name), keyed.contains(name));
            if let Room::Later(_) = room {
                if is_ready || is_keyed {
                    found.busy = true;
                    found.without_room(room);
                }
            } else if is_keyed {
                // Neither kind starves the other of slots: they take turns.
                let first = is_ready && std::mem::take(&mut self.keyed[index].first);
                if is_ready && !first {
                    self.claim_ready(index, &mut found)?;
                    self.keyed[index].first = true;
                }
                self.claim_keyed(index, &mut found)?;
                if first {
                    self.claim_ready(index, &mut found)?;
                }
            } else if is_ready {
                self.claim_ready(index, &mut found)?;
            }
        }
        Ok(found)
    }

    fn claim_ready(&mut self, index: usize, found: &mut Look) -> Result<(), StoreError> {
        let Some(limit) = self.room(index, found) else {
            return Ok(());
        };
        let lease_until = from_now(self.shared.lease);
        let claimed = self.session.claim(&self.claim(index, limit))?;
        let full = claimed.found() == limit;
        found.busy |= claimed.found() > 0;
        self.hand_over(index, lease_until, claimed);
        if full {
            self.full(index, found);
        }
        Ok(())
    }

    fn claim_keyed(&mut self, index: usize, found: &mut Look) -> Result<(), StoreError> {
        let lane = &self.shared.lanes[index];
        // Rows in hand may be what blocks: when they are settled there is more.
        let holding = self.shared.flights.len() > 0;
        let freed = lane.key_freed.swap(false, Ordering::AcqRel);
        if let Some(at) = self.keyed[index].blocked_at
            && !freed
            && at.elapsed() < BLOCKED_LOOK
        {
            found.full = true;
            found.within(BLOCKED_LOOK.saturating_sub(at.elapsed()));
            return Ok(());
        }
        let Some(limit) = self.room(index, found) else {
            return Ok(());
        };
        let lease_until = from_now(self.shared.lease);
        let claim = self.claim(index, limit);
        let answer = self
            .session
            .claim_keyed(&claim, &self.keyed[index].cursor)?;
        self.keyed[index].cursor = answer.cursor;
        self.keyed[index].blocked_at = (answer.keys == Keys::Blocked).then(Instant::now);
        // Counted here: they may be settled before we look again.
        let brought = answer.claimed.found() > 0;
        found.busy |= brought;
        self.hand_over(index, lease_until, answer.claimed);
        match answer.keys {
            Keys::More => self.full(index, found),
            Keys::Busy => {
                found.full = true;
                found.within(backoff::between(BUSY[0], BUSY[1]));
            }
            Keys::Blocked => {
                found.full |= holding || brought;
                found.within(BLOCKED);
            }
            Keys::Idle => {}
        }
        Ok(())
    }

    /// How many rows may be claimed, if any.
    fn room(&self, index: usize, found: &mut Look) -> Option<usize> {
        match self.shared.lanes[index].room(self.shared.batch, Instant::now()) {
            Room::For(rows) if !self.shared.is_stopping() => Some(rows),
            Room::For(_) => {
                found.full = true;
                None
            }
            room => {
                found.without_room(room);
                None
            }
        }
    }

    /// There is probably more to claim.
    fn full(&self, index: usize, found: &mut Look) {
        found.full = true;
        match self.shared.lanes[index].room(self.shared.batch, Instant::now()) {
            Room::For(_) => found.more = true,
            room => found.without_room(room),
        }
    }

    fn claim(&self, index: usize, limit: usize) -> Claim {
        let destination = &self.shared.lanes[index].destination;
        Claim {
            destination: destination.name.clone(),
            limit,
            worker_id: self.shared.worker_id.clone(),
            lease: self.shared.lease,
            max_attempts: destination.max_attempts,
            on_failure: destination.on_failure,
        }
    }

    /// Gives claimed rows to the workers of their destination.
    fn hand_over(&self, index: usize, lease_until: Instant, claimed: Claimed) {
        let shared = self.shared;
        let lane = &shared.lanes[index];
        add(&shared.counters.claimed, claimed.found());
        lane.spend(claimed.rows.len());
        add(&shared.counters.failed, claimed.corrupt + claimed.exhausted);
        if claimed.corrupt > 0 {
            tracing::warn!(
                rows = claimed.corrupt,
                "rows that cannot be decoded are failed"
            );
        }
        let held = claimed
            .rows
            .iter()
            .map(|(fence, entry)| (*fence, entry.ordering_key.is_some()));
        shared.flights.add(index, lease_until, held);
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
}
