//! The rows of an outbox in memory, and what becomes of them: the contract's
//! transitions on a map.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::clock::{delta, later};
use crate::claim::{
    Claim, Claimed, Due, Fence, KeyPolicy, KeyedClaim, Keys, Outcome, Settlement, Verdict,
    WORKER_PREFIX,
};
use crate::entry::{OutboxEntry, cut};
use crate::error::{StoreError, code};
use crate::id::{CommandId, OutboxId};
use crate::probe::{Answer, Probe, ProbeFence};
use crate::query::Enqueued;
use crate::record::{OutboxClaim, OutboxRecord};
use crate::status::OutboxStatus;

type Now = DateTime<Utc>;

/// What the counter of attempts holds at most, as the column does.
const MOST_ATTEMPTS: u32 = i32::MAX.cast_unsigned();

#[derive(Debug, Clone)]
struct Hold {
    worker_id: String,
    taken_at: Now,
    /// The lease that a dispatcher gave itself.
    expires_at: Option<Now>,
}

#[derive(Clone)]
struct Row {
    entry: OutboxEntry,
    enqueued_at: Now,
    hold: Option<Hold>,
    seq: Option<i64>,
    last_failure: Option<String>,
    remote_ref: Option<String>,
    unknown_since: Option<Now>,
    lapses: u32,
    probes: u32,
    halts_key: bool,
}

impl Row {
    fn new(entry: &OutboxEntry, now: Now) -> Self {
        let mut entry = entry.clone();
        entry.created_at = cut(entry.created_at);
        entry.next_attempt_at = entry.next_attempt_at.map(cut);
        entry.completed_at = entry.completed_at.map(cut);
        Self {
            entry,
            enqueued_at: now,
            hold: None,
            seq: None,
            last_failure: None,
            remote_ref: None,
            unknown_since: None,
            lapses: 0,
            probes: 0,
            halts_key: false,
        }
    }

    fn is(&self, status: OutboxStatus) -> bool {
        self.entry.status == status
    }

    fn due_at(&self) -> Now {
        let next = self.entry.next_attempt_at;
        next.map_or(self.enqueued_at, |next| next.max(self.enqueued_at))
    }

    /// Whether later rows of its key wait for it.
    fn holds_its_key(&self) -> bool {
        !self.entry.status.is_terminal() || (self.is(OutboxStatus::Failed) && self.halts_key)
    }

    fn attempts(&self) -> i32 {
        self.entry.attempt_count.cast_signed()
    }

    fn fence(&self, seq: i64) -> Fence {
        Fence {
            outbox_id: self.entry.outbox_id.0,
            seq,
            attempt: self.attempts(),
        }
    }

    fn record(&self, now: Now) -> OutboxRecord {
        OutboxRecord {
            entry: self.entry.clone(),
            claim: self.hold.as_ref().map(|hold| OutboxClaim {
                worker_id: hold.worker_id.clone(),
                claimed_at: hold.taken_at,
            }),
            last_failure: self.last_failure.clone(),
            remote_ref: self.remote_ref.clone(),
            enqueued_at: self.enqueued_at,
            unknown_since: self.unknown_since,
            unknown_for: self
                .unknown_since
                .map(|since| (now - since).to_std().unwrap_or_default()),
            probe_count: self.probes,
            lapse_count: self.lapses,
            halts_key: self.halts_key,
        }
    }

    fn claim(&mut self, hold: Hold) {
        self.entry.status = OutboxStatus::Dispatching;
        if self.entry.attempt_count < MOST_ATTEMPTS {
            self.entry.attempt_count += 1;
        }
        self.hold = Some(hold);
    }

    fn complete(&mut self, now: Now) {
        self.entry.status = OutboxStatus::Completed;
        self.entry.completed_at = Some(now);
        self.lapses = 0;
        self.hold = None;
    }

    fn fail(&mut self, reason: &str, now: Now) {
        self.entry.status = OutboxStatus::Failed;
        self.entry.completed_at = Some(now);
        self.last_failure = Some(reason.to_owned());
        self.lapses = 0;
        self.hold = None;
    }

    fn fail_by(&mut self, reason: &str, on_failure: KeyPolicy, now: Now) {
        self.fail(reason, now);
        self.halts_key = self.entry.ordering_key.is_some() && on_failure == KeyPolicy::Halt;
    }

    fn unknown(&mut self, now: Now) {
        self.entry.status = OutboxStatus::OutcomeUnknown;
        self.unknown_since = Some(now);
        self.hold = None;
    }

    fn requeue(&mut self, at: Option<Now>) {
        self.entry.status = OutboxStatus::Pending;
        self.entry.next_attempt_at = at;
        self.unknown_since = None;
        self.seq = None;
        self.hold = None;
    }

    fn is_held(&self, worker_id: &str, fence: Fence) -> bool {
        self.is(OutboxStatus::Dispatching)
            && self.seq == Some(fence.seq)
            && self.hold.as_ref().is_some_and(|h| h.worker_id == worker_id)
    }

    /// Whether the claim is over: by its own lease if a dispatcher took it, else by
    /// its age, or if it is from a future as far away.
    fn has_lapsed(&self, foreign_lease: Duration, now: Now) -> bool {
        let Some(hold) = &self.hold else { return true };
        match hold.expires_at {
            Some(expires_at) if hold.worker_id.starts_with(WORKER_PREFIX) => expires_at < now,
            _ => (now - hold.taken_at).abs() > delta(foreign_lease),
        }
    }
}

/// See the module.
#[derive(Default)]
pub(super) struct Table {
    rows: BTreeMap<Uuid, Row>,
    keys: HashMap<(String, String), Uuid>,
    last_seq: i64,
}

/// What an operation found and did.
pub(super) type Done<T> = Result<T, StoreError>;

impl Table {
    // ------------------------------------------------------------ by the caller

    fn key_of(entry: &OutboxEntry) -> (String, String) {
        (entry.destination.clone(), entry.idempotency_key.clone())
    }

    /// All of them, or none. The entries have been checked.
    pub(super) fn enqueue_all(&mut self, entries: &[OutboxEntry], now: Now) -> Done<()> {
        for (i, entry) in entries.iter().enumerate() {
            let (id, key) = (entry.outbox_id.0, Self::key_of(entry));
            if self.rows.contains_key(&id) || self.keys.contains_key(&key) {
                for entry in &entries[..i] {
                    self.rows.remove(&entry.outbox_id.0);
                    self.keys.remove(&Self::key_of(entry));
                }
                return Err(StoreError::Conflict);
            }
            self.rows.insert(id, Row::new(entry, now));
            self.keys.insert(key, id);
        }
        Ok(())
    }

    pub(super) fn enqueue_once(&mut self, entry: &OutboxEntry, now: Now) -> Done<Enqueued> {
        match self.enqueue_all(std::slice::from_ref(entry), now) {
            Ok(()) => Ok(Enqueued::New),
            Err(error) => {
                let same = self.keys.get(&Self::key_of(entry)).ok_or(error)?;
                let payload = self.rows.get(same).map(|row| &row.entry.payload);
                Ok(Enqueued::Duplicate {
                    outbox_id: OutboxId(*same),
                    same_payload: payload == Some(&entry.payload),
                })
            }
        }
    }

    fn row(&mut self, id: OutboxId) -> Done<&mut Row> {
        self.rows.get_mut(&id.0).ok_or(StoreError::NotFound)
    }

    pub(super) fn get(&self, id: OutboxId, now: Now) -> Done<OutboxRecord> {
        let row = self.rows.get(&id.0).ok_or(StoreError::NotFound)?;
        Ok(row.record(now))
    }

    /// The rows that `wanted` picks, oldest first.
    fn list(&self, now: Now, wanted: impl Fn(&Row) -> bool) -> Vec<OutboxRecord> {
        let mut rows: Vec<&Row> = self.rows.values().filter(|row| wanted(row)).collect();
        rows.sort_by_key(|row| (row.entry.created_at, row.entry.outbox_id));
        rows.into_iter().map(|row| row.record(now)).collect()
    }

    pub(super) fn all(&self, now: Now) -> Vec<OutboxRecord> {
        self.list(now, |_| true)
    }

    pub(super) fn of_command(&self, command: CommandId, now: Now) -> Vec<OutboxRecord> {
        self.list(now, |row| row.entry.command_id == command)
    }

    pub(super) fn claim_due(&mut self, at: Now, limit: usize, worker_id: &str) -> Vec<OutboxEntry> {
        let mut due: Vec<&mut Row> = self
            .rows
            .values_mut()
            .filter(|row| {
                row.is(OutboxStatus::Pending)
                    && row.entry.attempt_count < MOST_ATTEMPTS
                    && row.entry.next_attempt_at.is_none_or(|next| next <= at)
            })
            .collect();
        due.sort_by_key(|row| (row.entry.created_at, row.entry.outbox_id));
        due.truncate(limit);
        due.into_iter()
            .map(|row| {
                row.claim(Hold {
                    worker_id: worker_id.to_owned(),
                    taken_at: at,
                    expires_at: None,
                });
                row.entry.clone()
            })
            .collect()
    }

    pub(super) fn mark_completed(&mut self, id: OutboxId, now: Now) -> Done<()> {
        let row = self.row(id)?;
        match row.entry.status {
            OutboxStatus::Dispatching | OutboxStatus::OutcomeUnknown => row.complete(now),
            OutboxStatus::Completed => {}
            OutboxStatus::Pending | OutboxStatus::Failed => return Err(StoreError::Conflict),
        }
        Ok(())
    }

    pub(super) fn mark_failed(&mut self, id: OutboxId, reason: &str, now: Now) -> Done<()> {
        let row = self.row(id)?;
        match row.entry.status {
            OutboxStatus::Dispatching | OutboxStatus::OutcomeUnknown => row.fail(reason, now),
            OutboxStatus::Failed => row.last_failure = Some(reason.to_owned()),
            OutboxStatus::Pending | OutboxStatus::Completed => return Err(StoreError::Conflict),
        }
        Ok(())
    }

    pub(super) fn mark_outcome_unknown(
        &mut self,
        id: OutboxId,
        remote_ref: Option<&str>,
        now: Now,
    ) -> Done<()> {
        let row = self.row(id)?;
        let given = remote_ref.map(str::to_owned);
        match row.entry.status {
            OutboxStatus::Dispatching => {
                row.unknown(now);
                row.remote_ref = given;
                row.lapses = 0;
            }
            OutboxStatus::OutcomeUnknown => row.remote_ref = row.remote_ref.take().or(given),
            _ => return Err(StoreError::Conflict),
        }
        Ok(())
    }

    /// With a reason it is an answer, and the row is no suspect any more.
    pub(super) fn requeue(&mut self, id: OutboxId, reason: Option<&str>, at: Now) -> Done<()> {
        let row = self.row(id)?;
        if row.entry.status.is_terminal() {
            return Err(StoreError::Conflict);
        }
        row.requeue(Some(at));
        if let Some(reason) = reason {
            row.last_failure = Some(reason.to_owned());
            row.lapses = 0;
        }
        Ok(())
    }

    pub(super) fn release(&mut self, before: Now) -> Vec<OutboxId> {
        let expired = self.rows.values_mut().filter(|row| {
            row.is(OutboxStatus::Dispatching)
                && row.hold.as_ref().is_none_or(|hold| hold.taken_at < before)
        });
        expired
            .map(|row| {
                row.requeue(None);
                row.entry.outbox_id
            })
            .collect()
    }

    pub(super) fn redrive(&mut self, id: OutboxId) -> Done<()> {
        let row = self.row(id)?;
        if !row.is(OutboxStatus::Failed) {
            return Err(StoreError::Conflict);
        }
        row.requeue(None);
        row.entry.attempt_count = 0;
        row.entry.completed_at = None;
        row.lapses = 0;
        row.halts_key = false;
        Ok(())
    }

    pub(super) fn skip_failed(&mut self, id: OutboxId) -> Done<()> {
        let row = self.row(id)?;
        if !row.is(OutboxStatus::Failed) {
            return Err(StoreError::Conflict);
        }
        row.halts_key = false;
        Ok(())
    }

    // -------------------------------------------------------- by the dispatcher

    fn pending_of(&self, destination: &str) -> impl Iterator<Item = &Row> {
        self.rows.values().filter(move |row| {
            row.is(OutboxStatus::Pending) && row.entry.destination == destination
        })
    }

    pub(super) fn due(&self, destinations: &[String], now: Now) -> Due {
        let mut due = Due::default();
        let mut next: Option<Now> = None;
        for destination in destinations {
            let (mut ready, mut keyed) = (false, false);
            for row in self.pending_of(destination) {
                let at = row.due_at();
                if at > now {
                    next = Some(next.map_or(at, |next| next.min(at)));
                } else if row.entry.ordering_key.is_some() {
                    keyed = true;
                } else {
                    ready = true;
                }
            }
            if ready {
                due.ready.push(destination.clone());
            }
            if keyed {
                due.keyed.push(destination.clone());
            }
        }
        due.next = next.map(|at| (at - now).to_std().unwrap_or_default());
        due
    }

    pub(super) fn claim(&mut self, claim: &Claim, now: Now) -> Claimed {
        let ready = self
            .pending_of(&claim.destination)
            .filter(|row| row.entry.ordering_key.is_none() && row.due_at() <= now);
        let chosen = in_due_order(ready, claim.limit);
        self.take(claim, chosen, now)
    }

    pub(super) fn claim_keyed(&mut self, claim: &Claim, now: Now) -> KeyedClaim {
        let due = |row: &Row| row.is(OutboxStatus::Pending) && row.due_at() <= now;
        let mut heads: HashMap<&str, &Row> = HashMap::new();
        let mut any_due = false;
        let of_destination = self
            .rows
            .values()
            .filter(|row| row.entry.destination == claim.destination && row.holds_its_key());
        for row in of_destination {
            let Some(key) = row.entry.ordering_key.as_deref() else {
                continue;
            };
            any_due |= due(row);
            // What is in flight, unknown or halting comes before all that waits.
            let rank = |row: &Row| {
                let waits = row.is(OutboxStatus::Pending);
                (waits, row.entry.created_at, row.entry.outbox_id)
            };
            heads
                .entry(key)
                .and_modify(|head| {
                    if rank(row) < rank(head) {
                        *head = row;
                    }
                })
                .or_insert(row);
        }
        let chosen = in_due_order(heads.into_values().filter(|row| due(row)), claim.limit);
        let keys = if !any_due {
            Keys::Idle
        } else if chosen.len() == claim.limit {
            Keys::More
        } else {
            Keys::Blocked
        };
        KeyedClaim {
            claimed: self.take(claim, chosen, now),
            keys,
            cursor: String::new(),
        }
    }

    /// Claims these rows, and fails those whose attempts were spent before.
    fn take(&mut self, claim: &Claim, chosen: Vec<Uuid>, now: Now) -> Claimed {
        let mut claimed = Claimed::default();
        for id in chosen {
            self.last_seq += 1;
            let seq = self.last_seq;
            let Some(row) = self.rows.get_mut(&id) else {
                continue;
            };
            row.claim(Hold {
                worker_id: claim.worker_id.clone(),
                taken_at: now,
                expires_at: Some(later(now, claim.lease)),
            });
            row.seq = Some(seq);
            if row.entry.attempt_count > claim.max_attempts {
                // Its last call was another's: this claim began none.
                row.entry.attempt_count -= 1;
                row.fail_by(code::ATTEMPTS_EXHAUSTED, claim.on_failure, now);
                claimed.exhausted += 1;
            } else {
                claimed.rows.push((row.fence(seq), row.entry.clone()));
            }
        }
        claimed
    }

    pub(super) fn held(&self, worker_id: &str) -> Vec<Fence> {
        self.rows
            .values()
            .filter(|row| row.is(OutboxStatus::Dispatching))
            .filter(|row| row.hold.as_ref().is_some_and(|h| h.worker_id == worker_id))
            .filter_map(|row| row.seq.map(|seq| row.fence(seq)))
            .collect()
    }

    pub(super) fn settle(&mut self, worker_id: &str, settlement: &Settlement, now: Now) -> Verdict {
        let fence = settlement.fence;
        let Some(row) = self.rows.get_mut(&fence.outbox_id) else {
            return Verdict::Lost;
        };
        if row.is_held(worker_id, fence) {
            write(row, &settlement.outcome, now);
            return Verdict::Settled;
        }
        if row.seq != Some(fence.seq) {
            return Verdict::Lost;
        }
        match (row.entry.status, &settlement.outcome) {
            (OutboxStatus::OutcomeUnknown, Outcome::GiveBack) => Verdict::Lost,
            (OutboxStatus::OutcomeUnknown, _) if row.attempts() != fence.attempt => Verdict::Lost,
            // It is unknown already.
            (OutboxStatus::OutcomeUnknown, Outcome::Unknown { .. }) => Verdict::Settled,
            (OutboxStatus::OutcomeUnknown, outcome) => {
                write(row, outcome, now);
                Verdict::Late
            }
            (OutboxStatus::Completed, Outcome::Completed { .. })
            | (OutboxStatus::Failed, Outcome::Failed { .. }) => Verdict::Settled,
            _ => Verdict::Lost,
        }
    }

    pub(super) fn renew(
        &mut self,
        worker_id: &str,
        fences: &[Fence],
        lease: Duration,
        now: Now,
    ) -> Vec<i64> {
        let mut renewed = Vec::with_capacity(fences.len());
        for fence in fences {
            if let Some(row) = self.rows.get_mut(&fence.outbox_id)
                && row.is_held(worker_id, *fence)
                && let Some(hold) = &mut row.hold
            {
                hold.taken_at = now;
                hold.expires_at = Some(later(now, lease));
                renewed.push(fence.seq);
            }
        }
        renewed
    }

    pub(super) fn lapse(
        &mut self,
        destinations: &[String],
        foreign_lease: Duration,
        limit: usize,
        now: Now,
    ) -> usize {
        let lapsed = self.rows.values_mut().filter(|row| {
            row.is(OutboxStatus::Dispatching)
                && destinations.contains(&row.entry.destination)
                && row.has_lapsed(foreign_lease, now)
        });
        lapsed
            .take(limit)
            .map(|row| {
                row.unknown(now);
                row.last_failure = Some(code::LAPSED.to_owned());
                row.lapses += 1;
                row.entry.next_attempt_at = None;
            })
            .count()
    }

    pub(super) fn with_unknown(&self, destinations: &[String]) -> Vec<String> {
        let unknown = |destination: &&String| {
            self.rows.values().any(|row| {
                row.is(OutboxStatus::OutcomeUnknown) && row.entry.destination == **destination
            })
        };
        destinations.iter().filter(unknown).cloned().collect()
    }

    /// Rows that have been unknown for long enough, in the order in which they
    /// became so.
    fn ripe(&self, probe: &Probe, now: Now) -> Vec<Uuid> {
        let mut ripe: Vec<&Row> = self
            .rows
            .values()
            .filter(|row| {
                let next = row.entry.next_attempt_at;
                row.is(OutboxStatus::OutcomeUnknown)
                    && row.entry.destination == probe.destination
                    && row
                        .unknown_since
                        .is_some_and(|since| now - since >= delta(probe.settle_delay))
                    && next.is_none_or(|next| now - next >= delta(probe.due_for))
                    && !probe.except.contains(&row.entry.outbox_id.0)
            })
            .collect();
        ripe.sort_by_key(|row| (row.unknown_since, row.entry.outbox_id));
        ripe.into_iter().map(|row| row.entry.outbox_id.0).collect()
    }

    pub(super) fn claim_probes(
        &mut self,
        probe: &Probe,
        now: Now,
    ) -> Vec<(ProbeFence, OutboxRecord)> {
        let mut ripe = self.ripe(probe, now);
        let spent = |table: &Self, id: &Uuid| {
            let row = table.rows.get(id);
            row.is_some_and(|row| row.probes >= probe.max_probes)
        };
        for id in ripe
            .extract_if(.., |id| spent(self, id))
            .collect::<Vec<_>>()
        {
            if let Some(row) = self.rows.get_mut(&id)
                && row.last_failure.as_deref() != Some(code::ATTEMPTS_EXHAUSTED)
            {
                row.last_failure = Some(code::UNRESOLVED.to_owned());
            }
        }
        ripe.truncate(usize::try_from(probe.limit).unwrap_or(0));
        let mut questions = Vec::with_capacity(ripe.len());
        for id in ripe {
            let Some(row) = self.rows.get_mut(&id) else {
                continue;
            };
            row.probes += 1;
            let wait = probe
                .answer_within
                .saturating_add(probe.backoff.jittered(row.probes));
            row.entry.next_attempt_at = Some(later(now, wait));
            let fence = ProbeFence {
                outbox_id: id,
                seq: row.seq,
                attempt: row.attempts(),
                probe: row.probes.cast_signed(),
            };
            questions.push((fence, row.record(now)));
        }
        questions
    }

    pub(super) fn resend_ripe(&mut self, probe: &Probe, now: Now) -> usize {
        for row in self.rows.values_mut() {
            if row.is(OutboxStatus::OutcomeUnknown)
                && row.entry.destination == probe.destination
                && row.entry.attempt_count >= probe.max_attempts
            {
                row.last_failure = Some(code::ATTEMPTS_EXHAUSTED.to_owned());
            }
        }
        let ripe = self.ripe(probe, now);
        let mut resent = 0;
        for id in ripe {
            if let Some(row) = self.rows.get_mut(&id)
                && row.entry.attempt_count < probe.max_attempts
                && resent < usize::try_from(probe.limit).unwrap_or(0)
            {
                let nth = row.entry.attempt_count.max(1);
                row.requeue(Some(later(now, probe.backoff.jittered(nth))));
                row.probes += 1;
                resent += 1;
            }
        }
        resent
    }

    pub(super) fn answer(&mut self, fence: ProbeFence, answer: &Answer, now: Now) -> bool {
        let Some(row) = self.rows.get_mut(&fence.outbox_id) else {
            return false;
        };
        let asked = row.is(OutboxStatus::OutcomeUnknown)
            && row.seq == fence.seq
            && row.attempts() == fence.attempt
            && row.probes.cast_signed() == fence.probe;
        if !asked {
            return false;
        }
        match answer {
            Answer::Completed => row.complete(now),
            Answer::Failed { code, on_failure } => row.fail_by(code, *on_failure, now),
            Answer::Resend { delay } => row.requeue(Some(later(now, *delay))),
            Answer::Unresolved { delay } => {
                row.entry.next_attempt_at = Some(later(now, *delay));
            }
            Answer::Park { code, delay } => {
                row.entry.next_attempt_at = Some(later(now, *delay));
                row.last_failure = Some((*code).to_owned());
            }
        }
        true
    }
}

/// The ids of the first `limit` rows in the order in which they came due.
fn in_due_order<'a>(rows: impl Iterator<Item = &'a Row>, limit: usize) -> Vec<Uuid> {
    let mut rows: Vec<&Row> = rows.collect();
    rows.sort_by_key(|row| (row.due_at(), row.entry.outbox_id));
    rows.truncate(limit);
    rows.into_iter().map(|row| row.entry.outbox_id.0).collect()
}

/// Writes an outcome to a row that is held, or whose outcome was unknown.
fn write(row: &mut Row, outcome: &Outcome, now: Now) {
    match outcome {
        Outcome::Completed { remote_ref } => {
            row.complete(now);
            row.remote_ref = remote_ref.clone().or(row.remote_ref.take());
        }
        Outcome::Retry { code, delay } => {
            row.requeue(Some(later(now, *delay)));
            row.last_failure = Some(code.clone());
            row.lapses = 0;
        }
        Outcome::Failed { code, on_failure } => row.fail_by(code, *on_failure, now),
        Outcome::Unknown { code, remote_ref } => {
            row.unknown(now);
            row.remote_ref.clone_from(remote_ref);
            if let Some(code) = code {
                row.last_failure = Some((*code).to_owned());
            }
            row.entry.next_attempt_at = None;
            row.lapses = 0;
        }
        Outcome::GiveBack => {
            let next = row.entry.next_attempt_at;
            row.requeue(next);
            row.entry.attempt_count -= 1;
        }
    }
}
