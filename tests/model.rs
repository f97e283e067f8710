//! Random sequences of operations against a model that fits in a head, and
//! against PostgreSQL: the same answers and the same rows after every step.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::cell::RefCell;

use chrono::{DateTime, SubsecRound, TimeDelta, Utc};
use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel_outbox::OutboxStatus::{Completed, Dispatching, Failed, OutcomeUnknown, Pending};
use diesel_outbox::schema::tf_outbox;
use diesel_outbox::{
    CommandId, Enqueued, MemoryOutbox, OutboxEntry, OutboxId, OutboxRecord, OutboxStatus,
    OutboxStore, StoreError, claim_due, enqueue, enqueue_all, enqueue_once, get, list_for_command,
    mark_completed, mark_failed, mark_outcome_unknown, redrive, release_expired_claims, reschedule,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseResult, TestRunner};
use serde_json::{Value, json};
use support::db::TestDb;
use uuid::Uuid;

const STEPS: usize = 40;

/// Sequences of one run, unless `MODEL_CASES` says otherwise.
const CASES: u32 = 200;

const WORKERS: [&str; 2] = ["w0", "w1"];
const REASONS: [&str; 2] = ["x.one", "x.two"];

// -------------------------------------------------------------- what is done

/// Few ids, keys and instants, so that operations meet.
#[derive(Debug, Clone)]
struct NewRow {
    id: u8,
    command: u8,
    destination: u8,
    key: u8,
    payload: u8,
    attempts: u32,
    not_before: Option<Instant>,
    created: Instant,
    status: OutboxStatus,
}

/// Quarters of a microsecond from a fixed beginning: finer than the column.
type Instant = i64;

#[derive(Debug, Clone)]
enum Operation {
    Enqueue(NewRow),
    EnqueueOnce(NewRow),
    EnqueueAll(Vec<NewRow>),
    ClaimDue(Instant, usize, usize),
    MarkCompleted(u8),
    MarkFailed(u8, usize, Option<Instant>),
    MarkOutcomeUnknown(u8, Option<u8>),
    Reschedule(u8, Instant),
    Release(Instant),
    Redrive(u8),
    Get(u8),
    List(u8),
}

/// Where an operation runs; a refused one leaves either usable.
#[derive(Debug, Clone, Copy)]
enum Inside {
    Nothing,
    ATransaction,
}

fn instants() -> impl Strategy<Value = Instant> {
    0_i64..48
}

fn ids() -> impl Strategy<Value = u8> {
    0_u8..8
}

fn new_rows() -> impl Strategy<Value = NewRow> {
    let attempts = prop_oneof![
        20 => Just(0),
        2 => Just(7),
        1 => Just(i32::MAX.cast_unsigned() - 1),
        1 => Just(i32::MAX.cast_unsigned()),
        1 => Just(i32::MAX.cast_unsigned() + 1),
    ];
    let status = prop_oneof![30 => Just(Pending), 1 => Just(Dispatching), 1 => Just(Completed)];
    (
        (ids(), 0_u8..3, 0_u8..2, 0_u8..6, 0_u8..2),
        (
            attempts,
            proptest::option::of(instants()),
            instants(),
            status,
        ),
    )
        .prop_map(
            |(
                (id, command, destination, key, payload),
                (attempts, not_before, created, status),
            )| NewRow {
                id,
                command,
                destination,
                key,
                payload,
                attempts,
                not_before,
                created,
                status,
            },
        )
}

fn operations() -> impl Strategy<Value = Operation> {
    use Operation::{
        ClaimDue, Enqueue, EnqueueAll, EnqueueOnce, Get, List, MarkCompleted, MarkFailed,
        MarkOutcomeUnknown, Redrive, Release, Reschedule,
    };
    prop_oneof![
        4 => new_rows().prop_map(Enqueue),
        2 => new_rows().prop_map(EnqueueOnce),
        2 => vec(new_rows(), 0..4).prop_map(EnqueueAll),
        6 => (instants(), 0_usize..4, 0_usize..2).prop_map(|(at, n, w)| ClaimDue(at, n, w)),
        2 => ids().prop_map(MarkCompleted),
        4 => (ids(), 0_usize..2, proptest::option::of(instants()))
            .prop_map(|(id, reason, at)| MarkFailed(id, reason, at)),
        3 => (ids(), proptest::option::of(0_u8..3)).prop_map(|(id, r)| MarkOutcomeUnknown(id, r)),
        2 => (ids(), instants()).prop_map(|(id, at)| Reschedule(id, at)),
        1 => instants().prop_map(Release),
        2 => ids().prop_map(Redrive),
        1 => ids().prop_map(Get),
        1 => (0_u8..3).prop_map(List),
    ]
}

fn steps() -> impl Strategy<Value = Vec<(Operation, Inside)>> {
    let inside = prop_oneof![Just(Inside::Nothing), Just(Inside::ATransaction)];
    vec((operations(), inside), STEPS)
}

fn at(instant: Instant) -> DateTime<Utc> {
    "2026-01-01T00:00:00Z".parse::<DateTime<Utc>>().unwrap() + TimeDelta::nanoseconds(instant * 250)
}

fn cut(instant: Instant) -> DateTime<Utc> {
    at(instant).trunc_subsecs(6)
}

fn id(n: u8) -> OutboxId {
    OutboxId(Uuid::from_u128(n.into()))
}

fn command(n: u8) -> CommandId {
    CommandId(Uuid::from_u128(0xc0 + u128::from(n)))
}

fn remote_ref(n: u8) -> String {
    format!("r-{n}")
}

impl NewRow {
    fn payload(&self) -> Value {
        json!({ "i": self.payload })
    }

    fn entry(&self) -> OutboxEntry {
        let mut entry = OutboxEntry::new(
            format!("d{}", self.destination),
            format!("k{}", self.key),
            &self.payload(),
        )
        .unwrap()
        .with_id(id(self.id))
        .caused_by(command(self.command));
        entry.attempt_count = self.attempts;
        entry.next_attempt_at = self.not_before.map(at);
        entry.created_at = at(self.created);
        entry.status = self.status;
        entry
    }
}

// ----------------------------------------------------------------- the model

/// An instant of the server's clock: not known until it is seen, and then it may
/// not change.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Stamp {
    Null,
    Fresh,
    Seen(DateTime<Utc>),
}

#[derive(Debug, Clone)]
struct Row {
    id: OutboxId,
    command: CommandId,
    destination: String,
    key: String,
    payload: Value,
    status: OutboxStatus,
    attempts: i32,
    next_attempt_at: Option<DateTime<Utc>>,
    created_at: DateTime<Utc>,
    completed_at: Stamp,
    claim: Option<(&'static str, DateTime<Utc>)>,
    last_failure: Option<&'static str>,
    remote_ref: Option<String>,
    unknown_since: Stamp,
}

#[derive(Debug, Clone, PartialEq)]
enum Answer {
    Done,
    Enqueued(Enqueued),
    Claimed(Vec<(OutboxId, u32)>),
    Released(Vec<OutboxId>),
    Found(Vec<(OutboxId, OutboxStatus)>),
}

type Answered = Result<Answer, StoreError>;

#[derive(Debug, Default)]
struct Model(Vec<Row>);

impl Model {
    fn apply(&mut self, operation: &Operation) -> Answered {
        match operation {
            Operation::Enqueue(new) => self.enqueue_all(std::slice::from_ref(new)),
            Operation::EnqueueAll(new) => self.enqueue_all(new),
            Operation::EnqueueOnce(new) => self.enqueue_once(new),
            Operation::ClaimDue(at, limit, worker) => Ok(self.claim_due(*at, *limit, *worker)),
            Operation::MarkCompleted(id) => self.mark_completed(*id),
            Operation::MarkFailed(id, reason, Some(at)) => {
                self.back_to_pending(*id, *at, Some(REASONS[*reason]))
            }
            Operation::MarkFailed(id, reason, None) => self.fail(*id, REASONS[*reason]),
            Operation::MarkOutcomeUnknown(id, remote_ref) => self.unknown(*id, *remote_ref),
            Operation::Reschedule(id, at) => self.back_to_pending(*id, *at, None),
            Operation::Release(before) => Ok(self.release(*before)),
            Operation::Redrive(id) => self.redrive(*id),
            Operation::Get(id) => {
                let row = self.row(*id)?;
                Ok(Answer::Found(vec![(row.id, row.status)]))
            }
            Operation::List(n) => {
                self.0.sort_by_key(|row| (row.created_at, row.id));
                let of_command = self.0.iter().filter(|row| row.command == command(*n));
                Ok(Answer::Found(
                    of_command.map(|row| (row.id, row.status)).collect(),
                ))
            }
        }
    }

    fn row(&mut self, n: u8) -> Result<&mut Row, StoreError> {
        let row = self.0.iter_mut().find(|row| row.id == id(n));
        row.ok_or(StoreError::NotFound)
    }

    fn refuse_illegal(new: &NewRow) -> Result<(), StoreError> {
        let invalid = |field| {
            Err(StoreError::Other {
                code: "turnframe.store.invalid_record",
                field: Some(field),
            })
        };
        if new.status != Pending {
            return invalid("status");
        }
        if i32::try_from(new.attempts).is_err() {
            return invalid("attempt_count");
        }
        Ok(())
    }

    fn enqueue_all(&mut self, new: &[NewRow]) -> Answered {
        new.iter().try_for_each(Self::refuse_illegal)?;
        let before = self.0.len();
        for new in new {
            let entry = new.entry();
            let taken = self.0.iter().any(|row| {
                row.id == entry.outbox_id
                    || (&row.destination, &row.key) == (&entry.destination, &entry.idempotency_key)
            });
            if taken {
                self.0.truncate(before);
                return Err(StoreError::Conflict);
            }
            self.0.push(Row {
                id: entry.outbox_id,
                command: entry.command_id,
                destination: entry.destination,
                key: entry.idempotency_key,
                payload: entry.payload,
                status: Pending,
                attempts: i32::try_from(new.attempts).unwrap(),
                next_attempt_at: new.not_before.map(cut),
                created_at: cut(new.created),
                completed_at: Stamp::Null,
                claim: None,
                last_failure: None,
                remote_ref: None,
                unknown_since: Stamp::Null,
            });
        }
        Ok(Answer::Done)
    }

    fn enqueue_once(&mut self, new: &NewRow) -> Answered {
        match self.enqueue_all(std::slice::from_ref(new)) {
            Ok(_) => Ok(Answer::Enqueued(Enqueued::New)),
            Err(StoreError::Conflict) => {
                let entry = new.entry();
                let same = self.0.iter().find(|row| {
                    (&row.destination, &row.key) == (&entry.destination, &entry.idempotency_key)
                });
                let same = same.ok_or(StoreError::Conflict)?;
                Ok(Answer::Enqueued(Enqueued::Duplicate {
                    outbox_id: same.id,
                    same_payload: same.payload == entry.payload,
                }))
            }
            Err(error) => Err(error),
        }
    }

    fn claim_due(&mut self, at: Instant, limit: usize, worker: usize) -> Answer {
        self.0.sort_by_key(|row| (row.created_at, row.id));
        let due = self.0.iter_mut().filter(|row| {
            row.status == Pending
                && row.attempts < i32::MAX
                && row.next_attempt_at.is_none_or(|next| next <= cut(at))
        });
        let claimed = due.take(limit).map(|row| {
            row.status = Dispatching;
            row.attempts += 1;
            row.claim = Some((WORKERS[worker], cut(at)));
            (row.id, row.attempts.cast_unsigned())
        });
        Answer::Claimed(claimed.collect())
    }

    fn mark_completed(&mut self, id: u8) -> Answered {
        let row = self.row(id)?;
        match row.status {
            Dispatching | OutcomeUnknown => {
                row.status = Completed;
                row.completed_at = Stamp::Fresh;
                row.claim = None;
            }
            Completed => {}
            _ => return Err(StoreError::Conflict),
        }
        Ok(Answer::Done)
    }

    fn fail(&mut self, id: u8, reason: &'static str) -> Answered {
        let row = self.row(id)?;
        match row.status {
            Dispatching | OutcomeUnknown => {
                row.status = Failed;
                row.completed_at = Stamp::Fresh;
                row.claim = None;
            }
            Failed => {}
            _ => return Err(StoreError::Conflict),
        }
        row.last_failure = Some(reason);
        Ok(Answer::Done)
    }

    fn back_to_pending(&mut self, id: u8, at: Instant, reason: Option<&'static str>) -> Answered {
        let row = self.row(id)?;
        if matches!(row.status, Completed | Failed) {
            return Err(StoreError::Conflict);
        }
        row.status = Pending;
        row.next_attempt_at = Some(cut(at));
        row.claim = None;
        row.last_failure = reason.or(row.last_failure);
        row.unknown_since = Stamp::Null;
        Ok(Answer::Done)
    }

    fn unknown(&mut self, id: u8, given: Option<u8>) -> Answered {
        let row = self.row(id)?;
        let given = given.map(remote_ref);
        match row.status {
            Dispatching => {
                row.status = OutcomeUnknown;
                row.remote_ref = given;
                row.unknown_since = Stamp::Fresh;
                row.claim = None;
            }
            OutcomeUnknown => row.remote_ref = row.remote_ref.take().or(given),
            _ => return Err(StoreError::Conflict),
        }
        Ok(Answer::Done)
    }

    fn release(&mut self, before: Instant) -> Answer {
        let mut released = Vec::new();
        for row in &mut self.0 {
            if row.claim.is_some_and(|(_, taken)| taken < cut(before)) {
                row.status = Pending;
                row.next_attempt_at = None;
                row.claim = None;
                released.push(row.id);
            }
        }
        released.sort_unstable();
        Answer::Released(released)
    }

    fn redrive(&mut self, id: u8) -> Answered {
        let row = self.row(id)?;
        if row.status != Failed {
            return Err(StoreError::Conflict);
        }
        row.status = Pending;
        row.attempts = 0;
        row.next_attempt_at = None;
        row.completed_at = Stamp::Null;
        row.unknown_since = Stamp::Null;
        Ok(Answer::Done)
    }
}

// ------------------------------------------------------------- the real thing

fn perform(conn: &mut PgConnection, operation: &Operation) -> Answered {
    let done = |()| Answer::Done;
    match operation {
        Operation::Enqueue(new) => enqueue(conn, &new.entry()).map(done),
        Operation::EnqueueOnce(new) => enqueue_once(conn, &new.entry()).map(Answer::Enqueued),
        Operation::EnqueueAll(new) => {
            let entries: Vec<_> = new.iter().map(NewRow::entry).collect();
            enqueue_all(conn, &entries).map(done)
        }
        Operation::ClaimDue(instant, limit, worker) => {
            let claimed = claim_due(conn, at(*instant), *limit, WORKERS[*worker])?;
            assert!(claimed.iter().all(|entry| entry.status == Dispatching));
            Ok(Answer::Claimed(
                claimed
                    .into_iter()
                    .map(|entry| (entry.outbox_id, entry.attempt_count))
                    .collect(),
            ))
        }
        Operation::MarkCompleted(n) => mark_completed(conn, id(*n)).map(done),
        Operation::MarkFailed(n, reason, retry_at) => {
            mark_failed(conn, id(*n), REASONS[*reason], retry_at.map(at)).map(done)
        }
        Operation::MarkOutcomeUnknown(n, given) => {
            mark_outcome_unknown(conn, id(*n), given.map(remote_ref).as_deref()).map(done)
        }
        Operation::Reschedule(n, instant) => reschedule(conn, id(*n), at(*instant)).map(done),
        Operation::Release(before) => {
            release_expired_claims(conn, at(*before)).map(Answer::Released)
        }
        Operation::Redrive(n) => redrive(conn, id(*n)).map(done),
        Operation::Get(n) => {
            let record = get(conn, id(*n))?;
            Ok(Answer::Found(vec![(
                record.entry.outbox_id,
                record.entry.status,
            )]))
        }
        Operation::List(n) => Ok(Answer::Found(
            list_for_command(conn, command(*n))?
                .into_iter()
                .map(|record| (record.entry.outbox_id, record.entry.status))
                .collect(),
        )),
    }
}

/// The same on a store.
fn perform_on(store: &dyn OutboxStore, operation: &Operation) -> Answered {
    let done = |()| Answer::Done;
    let found = |records: Vec<OutboxRecord>| {
        let rows = records.into_iter();
        Answer::Found(rows.map(|r| (r.entry.outbox_id, r.entry.status)).collect())
    };
    match operation {
        Operation::Enqueue(new) => store.enqueue(&new.entry()).map(done),
        Operation::EnqueueOnce(new) => store.enqueue_once(&new.entry()).map(Answer::Enqueued),
        Operation::EnqueueAll(new) => {
            let entries: Vec<_> = new.iter().map(NewRow::entry).collect();
            store.enqueue_all(&entries).map(done)
        }
        Operation::ClaimDue(instant, limit, worker) => {
            let claimed = store.claim_due(at(*instant), *limit, WORKERS[*worker])?;
            let rows = claimed.into_iter();
            Ok(Answer::Claimed(
                rows.map(|row| (row.outbox_id, row.attempt_count)).collect(),
            ))
        }
        Operation::MarkCompleted(n) => store.mark_completed(id(*n)).map(done),
        Operation::MarkFailed(n, reason, retry_at) => store
            .mark_failed(id(*n), REASONS[*reason], retry_at.map(at))
            .map(done),
        Operation::MarkOutcomeUnknown(n, given) => store
            .mark_outcome_unknown(id(*n), given.map(remote_ref).as_deref())
            .map(done),
        Operation::Reschedule(n, instant) => store.reschedule(id(*n), at(*instant)).map(done),
        Operation::Release(before) => store
            .release_expired_claims(at(*before))
            .map(Answer::Released),
        Operation::Redrive(n) => store.redrive(id(*n)).map(done),
        Operation::Get(n) => store.get(id(*n)).map(|record| found(vec![record])),
        Operation::List(n) => store.list_for_command(command(*n)).map(found),
    }
}

/// Commits also what was refused: the refusal has written nothing.
fn perform_inside(conn: &mut PgConnection, inside: Inside, operation: &Operation) -> Answered {
    match inside {
        Inside::Nothing => perform(conn, operation),
        Inside::ATransaction => conn
            .transaction::<_, diesel::result::Error, _>(|conn| {
                let answered = perform(conn, operation);
                conn.batch_execute("SELECT 1")?;
                Ok(answered)
            })
            .unwrap(),
    }
}

/// Every column of a row.
#[derive(Debug, Clone, Queryable, Selectable)]
#[diesel(table_name = tf_outbox)]
struct Stored {
    outbox_id: Uuid,
    command_id: Uuid,
    destination: String,
    payload: Value,
    idempotency_key: String,
    status: String,
    attempt_count: i32,
    next_attempt_at: Option<DateTime<Utc>>,
    created_at: DateTime<Utc>,
    completed_at: Option<DateTime<Utc>>,
    claim_worker_id: Option<String>,
    claim_taken_at: Option<DateTime<Utc>>,
    last_failure: Option<String>,
    remote_ref: Option<String>,
    claim_seq: Option<i64>,
    claim_expires_at: Option<DateTime<Utc>>,
    lapse_count: i32,
    unknown_since: Option<DateTime<Utc>>,
    ordering_key: Option<String>,
    halts_key: bool,
    headers: Option<Value>,
    probe_count: i32,
}

/// Takes a fresh stamp for what is stored, and holds a seen one against it.
fn compare_stamp(model: &mut Stamp, stored: Option<DateTime<Utc>>) -> TestCaseResult {
    if let (Stamp::Fresh, Some(instant)) = (*model, stored) {
        *model = Stamp::Seen(instant);
    }
    prop_assert_eq!(*model, stored.map_or(Stamp::Null, Stamp::Seen));
    Ok(())
}

fn compare(model: &mut Model, conn: &mut PgConnection) -> TestCaseResult {
    let stored: Vec<Stored> = tf_outbox::table
        .order(tf_outbox::outbox_id)
        .select(Stored::as_select())
        .load(conn)
        .unwrap();
    model.0.sort_by_key(|row| row.id);
    prop_assert_eq!(stored.len(), model.0.len());
    for (row, stored) in model.0.iter_mut().zip(stored) {
        compare_stamp(&mut row.completed_at, stored.completed_at)?;
        compare_stamp(&mut row.unknown_since, stored.unknown_since)?;
        prop_assert_eq!(row.id.0, stored.outbox_id);
        prop_assert_eq!(row.command.0, stored.command_id);
        prop_assert_eq!(&row.destination, &stored.destination);
        prop_assert_eq!(&row.payload, &stored.payload);
        prop_assert_eq!(&row.key, &stored.idempotency_key);
        prop_assert_eq!(row.status.as_str(), stored.status);
        prop_assert_eq!(row.attempts, stored.attempt_count);
        prop_assert_eq!(row.next_attempt_at, stored.next_attempt_at);
        prop_assert_eq!(row.created_at, stored.created_at);
        prop_assert_eq!(
            row.claim,
            stored.claim_worker_id.as_deref().map(|worker| {
                let known = WORKERS.iter().find(|known| **known == worker);
                (*known.unwrap(), stored.claim_taken_at.unwrap())
            })
        );
        prop_assert_eq!(row.claim.is_some(), stored.claim_taken_at.is_some());
        prop_assert_eq!(row.last_failure, stored.last_failure.as_deref());
        prop_assert_eq!(&row.remote_ref, &stored.remote_ref);
        // By id there is neither fence, lease, lapse nor probe.
        prop_assert_eq!((stored.claim_seq, stored.claim_expires_at), (None, None));
        prop_assert_eq!((stored.lapse_count, stored.probe_count), (0, 0));
        prop_assert_eq!((stored.ordering_key, stored.headers), (None, None));
        prop_assert!(!stored.halts_key);
    }
    Ok(())
}

/// The outbox in memory has no columns to look into, so its records are compared.
fn compare_records(model: &mut Model, records: Vec<OutboxRecord>) -> TestCaseResult {
    model.0.sort_by_key(|row| (row.created_at, row.id));
    prop_assert_eq!(records.len(), model.0.len());
    for (row, record) in model.0.iter_mut().zip(records) {
        let entry = &record.entry;
        compare_stamp(&mut row.completed_at, entry.completed_at)?;
        compare_stamp(&mut row.unknown_since, record.unknown_since)?;
        prop_assert_eq!((row.id, row.command), (entry.outbox_id, entry.command_id));
        prop_assert_eq!(&row.destination, &entry.destination);
        prop_assert_eq!(&row.payload, &entry.payload);
        prop_assert_eq!(&row.key, &entry.idempotency_key);
        prop_assert_eq!(row.status, entry.status);
        prop_assert_eq!(row.attempts.cast_unsigned(), entry.attempt_count);
        prop_assert_eq!(row.next_attempt_at, entry.next_attempt_at);
        prop_assert_eq!(row.created_at, entry.created_at);
        let claim = record.claim.as_ref();
        prop_assert_eq!(
            row.claim,
            claim.map(|claim| {
                let known = WORKERS.iter().find(|known| **known == claim.worker_id);
                (*known.unwrap(), claim.claimed_at)
            })
        );
        prop_assert_eq!(row.last_failure, record.last_failure.as_deref());
        prop_assert_eq!(&row.remote_ref, &record.remote_ref);
        prop_assert_eq!((record.lapse_count, record.probe_count), (0, 0));
        prop_assert!(!record.halts_key);
    }
    Ok(())
}

#[test]
fn any_sequence_of_operations_does_the_same_in_memory() {
    let config = Config {
        cases: 5 * CASES,
        failure_persistence: None,
        ..Config::default()
    };
    TestRunner::new(config)
        .run(&steps(), |steps| {
            let outbox = MemoryOutbox::new();
            let mut model = Model::default();
            for (n, (operation, _)) in steps.iter().enumerate() {
                let expected = model.apply(operation);
                let answered = perform_on(&outbox, operation);
                prop_assert_eq!(&answered, &expected, "step {}: {:?}", n, operation);
                compare_records(&mut model, outbox.rows())
                    .map_err(|error| TestCaseError::fail(format!("step {n}: {error}")))?;
            }
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn any_sequence_of_operations_does_what_the_model_does() {
    let cases = std::env::var("MODEL_CASES")
        .map(|cases| cases.parse().expect("MODEL_CASES is a number"))
        .unwrap_or(CASES);
    let db = TestDb::new();
    let conn = RefCell::new(db.connect());
    conn.borrow_mut()
        .batch_execute("SET synchronous_commit = off")
        .unwrap();
    // What was met, so that a run that never meets anything is not taken for one
    // that passed.
    let met = RefCell::new([0_u32; 3]);
    // A failing sequence is printed, shortened; no file is left behind.
    let config = Config {
        cases,
        failure_persistence: None,
        ..Config::default()
    };
    TestRunner::new(config)
        .run(&steps(), |steps| {
            let conn = &mut *conn.borrow_mut();
            conn.batch_execute("TRUNCATE tf_outbox").unwrap();
            let mut model = Model::default();
            for (n, (operation, inside)) in steps.iter().enumerate() {
                let expected = model.apply(operation);
                let answered = perform_inside(conn, *inside, operation);
                prop_assert_eq!(&answered, &expected, "step {}: {:?}", n, operation);
                compare(&mut model, conn)
                    .map_err(|error| TestCaseError::fail(format!("step {n}: {error}")))?;
                let met = &mut *met.borrow_mut();
                match answered {
                    Ok(Answer::Claimed(rows)) if !rows.is_empty() => met[0] += 1,
                    Err(StoreError::Conflict) => met[1] += 1,
                    Ok(Answer::Done) => met[2] += 1,
                    _ => {}
                }
            }
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{error}"));
    let met = met.into_inner();
    assert!(met.iter().all(|n| *n >= cases), "{met:?}");
}
