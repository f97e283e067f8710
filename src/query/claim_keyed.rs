//! pending → dispatching, for the dispatcher: rows with an ordering key, never two
//! of one (destination, key) at a time.
//!
//! Nothing about waiting is stored. The head of a key is computed from one index
//! (`tf_outbox_heads`), and the keyed claims of one destination are made one at a
//! time, under a lock. So every claim sees the ones before it, and a row whose
//! key has another in flight is not the head. Whatever else changes a row can only
//! *end* a flight; to see that late costs a look, never the order.

use std::collections::HashSet;

use diesel::dsl::array;
use diesel::pg::PgConnection;
use diesel::prelude::*;

use super::bind;
use super::claim_ready::{Taken, hand_out, take};
use super::decode::{Kept, StatusText};
use super::expression::{
    Pending, hashtext, later_of, pg_try_advisory_xact_lock, statement_timestamp, tf_outbox_heads,
    tf_outbox_keys,
};
use super::fault::{OrStoreError, Phase};
use crate::claim::{Claim, Claimed, KeyedClaim, Keys};
use crate::error::StoreError;
use crate::schema::tf_outbox;
use crate::status::OutboxStatus;

diesel::alias!(tf_outbox as due: Due);

/// The class of the advisory locks of keyed claims; the object is the hash of the
/// destination.
const LOCK_CLASS: i32 = 7310;
/// Rows of one window.
const WINDOW: usize = 500;
/// Keys of one claiming statement after the first.
const CHUNK: usize = 256;
/// Keys of one rotation.
const ROTATION: i32 = 200;

/// Which end of the due rows a window shows.
#[derive(Clone, Copy)]
enum End {
    Oldest,
    Newest,
}

/// One look at the keyed rows of a destination. To be run in a READ COMMITTED
/// transaction of its own that ends soon: it holds the lock.
pub(crate) fn claim_keyed(
    conn: &mut PgConnection,
    claim: &Claim,
    cursor: &str,
) -> Result<KeyedClaim, StoreError> {
    let mut look = Look {
        conn,
        claim,
        tried: HashSet::new(),
        taken: Vec::new(),
    };
    let mut next_cursor = cursor.to_owned();
    let keys = look.run(&mut next_cursor)?;
    let taken = look.taken;
    Ok(KeyedClaim {
        claimed: match taken.is_empty() {
            true => Claimed::default(),
            false => hand_out(conn, claim, taken)?,
        },
        keys,
        cursor: next_cursor,
    })
}

struct Look<'a> {
    conn: &'a mut PgConnection,
    claim: &'a Claim,
    /// Keys whose head this look has judged.
    tried: HashSet<String>,
    taken: Vec<Taken>,
}

impl Look<'_> {
    fn run(&mut self, cursor: &mut String) -> Result<Keys, StoreError> {
        if !self.lock()? {
            return Ok(Keys::Busy);
        }
        let oldest = self.window(End::Oldest)?;
        if oldest.is_empty() {
            return Ok(Keys::Idle);
        }
        let crowded = oldest.len() == WINDOW;
        self.take_heads(oldest, self.claim.limit)?;
        if self.left() == 0 {
            return Ok(Keys::More);
        }
        if !crowded {
            return Ok(Keys::Blocked);
        }
        // The window is full of rows that wait for others of their keys. Keys
        // that came into it late, and those that it never shows, get their turn.
        let before = self.taken.len();
        let newest = self.window(End::Newest)?;
        self.take_heads(newest, self.left().div_ceil(2))?;
        if self.left() > 0 {
            let rotation = self.rotation(cursor)?;
            self.take_heads(rotation, self.left())?;
        }
        Ok(match self.taken.len() > before {
            true => Keys::More,
            false => Keys::Blocked,
        })
    }

    fn left(&self) -> usize {
        self.claim.limit - self.taken.len()
    }

    /// A statement of its own, before the others: their snapshots must be younger
    /// than the lock.
    fn lock(&mut self) -> Result<bool, StoreError> {
        diesel::select(pg_try_advisory_xact_lock(
            LOCK_CLASS,
            hashtext(self.claim.destination.as_str()),
        ))
        .get_result(self.conn)
        .or_store_error(Phase::Statement)
    }

    /// The keys of the rows that came due first or last.
    fn window(&mut self, end: End) -> Result<Vec<String>, StoreError> {
        macro_rules! ready {
            () => {
                tf_outbox::table
                    .filter(tf_outbox::destination.eq(self.claim.destination.as_str()))
                    .filter(tf_outbox::status.eq(Pending))
                    .filter(tf_outbox::ordering_key.is_not_null())
                    .filter(due_at!().le(statement_timestamp()))
                    .limit(bind::limit(WINDOW))
                    .select(tf_outbox::ordering_key.assume_not_null())
            };
        }
        macro_rules! due_at {
            () => {
                later_of(tf_outbox::enqueued_at, tf_outbox::next_attempt_at)
            };
        }
        let keys = match end {
            End::Oldest => ready!()
                .order((due_at!(), tf_outbox::outbox_id))
                .load::<Kept<String>>(self.conn),
            End::Newest => ready!()
                .order((due_at!().desc(), tf_outbox::outbox_id.desc()))
                .load::<Kept<String>>(self.conn),
        };
        let keys = keys.or_store_error(Phase::Statement)?;
        Ok(keys.into_iter().filter_map(|Kept(key)| key).collect())
    }

    /// The next keys after the cursor, whichever rows they have.
    fn rotation(&mut self, cursor: &mut String) -> Result<Vec<String>, StoreError> {
        let keys = diesel::select(tf_outbox_keys(
            self.claim.destination.as_str(),
            cursor.as_str(),
            ROTATION,
        ))
        .get_result::<Vec<String>>(self.conn)
        .or_store_error(Phase::Statement)?;
        *cursor = match keys.len() < ROTATION as usize {
            true => String::new(),
            false => keys.last().cloned().unwrap_or_default(),
        };
        Ok(keys)
    }

    /// Claims up to `limit` heads of keys that were not tried, in the order of
    /// the keys.
    fn take_heads(&mut self, keys: Vec<String>, limit: usize) -> Result<(), StoreError> {
        let goal = self.taken.len() + limit;
        let tried = &mut self.tried;
        let fresh: Vec<String> = keys
            .into_iter()
            .filter(|key| tried.insert(key.clone()))
            .collect();
        let mut rest = fresh.as_slice();
        // Some heads are in flight or not due: a few keys more than rows.
        let mut chunk = limit.saturating_add(limit / 4).saturating_add(8);
        while self.taken.len() < goal && !rest.is_empty() {
            let (now, later) = rest.split_at(chunk.min(rest.len()));
            let taken = self.take(now, goal - self.taken.len())?;
            self.taken.extend(taken);
            (rest, chunk) = (later, CHUNK);
        }
        Ok(())
    }

    /// Claims the heads of `keys` that are pending and due. The statement sees
    /// one head a key, and the lock keeps everybody else from claiming it.
    fn take(&mut self, keys: &[String], limit: usize) -> Result<Vec<Taken>, StoreError> {
        let heads = diesel::select(tf_outbox_heads(self.claim.destination.as_str(), keys));
        let due_at = later_of(
            due.field(tf_outbox::enqueued_at),
            due.field(tf_outbox::next_attempt_at),
        );
        let first_due = due
            .filter(due.field(tf_outbox::outbox_id).eq_any(array(heads)))
            .filter(
                due.field(tf_outbox::status)
                    .concat("")
                    .eq(StatusText(OutboxStatus::Pending)),
            )
            .filter(due_at.le(statement_timestamp()))
            .order((due_at, due.field(tf_outbox::outbox_id)))
            .limit(bind::limit(limit))
            .select(due.field(tf_outbox::outbox_id))
            .for_update()
            .skip_locked();
        take!(self.claim, first_due)
            .load::<Taken>(self.conn)
            .or_store_error(Phase::Statement)
    }
}
