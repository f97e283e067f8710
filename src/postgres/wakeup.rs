//! LISTEN: hearing that rows were inserted.
//!
//! The listening connection only makes the dispatcher faster; the poll is what
//! makes it sure. So a lost connection is said once, and made again quietly.

use std::time::{Duration, Instant};

use diesel::RunQueryDsl;
use diesel::connection::SimpleConnection;
use diesel::pg::PgConnection;

use super::connection::Connection;
use super::sleep::{CLASS, Heard, Locks, QUIET, SLEEP, Sleeper};
use crate::dispatcher::bell::{Closed, Ear, UNHEARD};
use crate::error::StoreError;
use crate::query::{self, CHANNEL, OrStoreError, Phase};

/// On this channel a dispatcher proves that notifications reach it. Of its own, so
/// that it wakes nobody.
const ECHO: &str = "tf_outbox_echo";

/// Diesel cannot block until a notification comes, so it is asked for: this
/// often while they come …
const BUSY: Duration = Duration::from_millis(1);
/// … and this often when none has come for a while.
const IDLE: Duration = Duration::from_millis(5);
/// A connection that died without a word is found by asking it something.
const CHECK: Duration = Duration::from_secs(10);
const RECONNECT: Duration = Duration::from_millis(500);
/// A notification that has not come by then does not come.
const ECHO_WITHIN: Duration = Duration::from_secs(3);
/// When to try again whether notifications arrive.
const ECHO_AGAIN: Duration = Duration::from_secs(60);

/// Why nobody listens at the moment.
enum Ended {
    Closed,
    Failed(StoreError),
    /// LISTEN worked and nothing came, as behind a pooler that gives each
    /// transaction another server connection.
    Unheard,
}

impl From<StoreError> for Ended {
    fn from(error: StoreError) -> Self {
        Self::Failed(error)
    }
}

impl From<Closed> for Ended {
    fn from(_: Closed) -> Self {
        Self::Closed
    }
}

/// Listens until the dispatcher ends. `talking` is for the proof that this is of
/// use.
pub(super) fn listen(mut listening: Connection, mut talking: Connection, ear: &Ear) {
    // What is said once: that it does not work, until it works again.
    let mut said = false;
    loop {
        let ended = hear(&mut listening, &mut talking, ear, &mut said);
        listening.close();
        talking.close();
        ear.allow_rest(UNHEARD);
        ear.ring();
        let wait = match ended {
            Ended::Closed => return,
            Ended::Failed(error) => {
                if !said {
                    tracing::warn!(%error, "the outbox listener lost its connection; polling meanwhile");
                }
                RECONNECT
            }
            Ended::Unheard => {
                if !said {
                    tracing::warn!(
                        "notifications do not reach the outbox listener, as behind a \
                         transaction-pooling proxy (which wants Route::TransactionPooler); \
                         polling instead"
                    );
                }
                ECHO_AGAIN
            }
        };
        said = true;
        if ear.wait(wait) == Err(Closed) {
            return;
        }
    }
}

/// Listens until the dispatcher ends or the connection fails.
fn hear(listening: &mut Connection, talking: &mut Connection, ear: &Ear, said: &mut bool) -> Ended {
    let heard = listening.get().map_err(Ended::from).and_then(|conn| {
        start(conn, talking, ear)?;
        if std::mem::take(said) {
            tracing::info!("the outbox listener hears again");
        }
        keep_hearing(conn, ear)
    });
    match heard {
        Ok(never) => match never {},
        Err(ended) => ended,
    }
}

/// LISTEN, and the proof that it is of use.
fn start(conn: &mut PgConnection, talking: &mut Connection, ear: &Ear) -> Result<(), Ended> {
    for channel in [CHANNEL, ECHO] {
        conn.batch_execute(&format!("LISTEN {channel}"))
            .or_store_error(Phase::Read)?;
    }
    let token = uuid::Uuid::new_v4().simple().to_string();
    talking.statement(|conn| query::notify_on(conn, ECHO, &token))?;
    talking.close();
    let asked = Instant::now();
    while asked.elapsed() < ECHO_WITHIN {
        for notification in conn.notifications_iter() {
            let notification = notification.or_store_error(Phase::Read)?;
            if notification.channel == ECHO && notification.payload == token {
                return Ok(());
            }
        }
        ear.hears();
        ear.wait(BUSY)?;
    }
    // Perhaps it reaches the server connection on which we listened.
    let _ = conn.batch_execute("UNLISTEN *");
    Err(Ended::Unheard)
}

fn keep_hearing(conn: &mut PgConnection, ear: &Ear) -> Result<std::convert::Infallible, Ended> {
    // Rows may have come while nobody listened.
    ear.ring();
    let mut sleeper = Sleeper::new(ear, Instant::now());
    let mut last_heard = Instant::now();
    let mut asked = Instant::now();
    loop {
        let mut heard = Heard::Nothing;
        for notification in conn.notifications_iter() {
            if notification.or_store_error(Phase::Read)?.channel == CHANNEL {
                heard = Heard::Notification;
            }
        }
        let now = Instant::now();
        if heard == Heard::Notification {
            last_heard = now;
        }
        sleeper.step(heard, now, ear, &mut OnConnection(conn))?;
        if asked.elapsed() > CHECK {
            asked = now;
            diesel::sql_query("SELECT 1")
                .execute(conn)
                .or_store_error(Phase::Read)?;
        }
        ear.hears();
        let pause = match now.duration_since(last_heard) < Duration::from_secs(1) {
            true => BUSY,
            false => IDLE,
        };
        ear.pause(sleeper.due(now).map_or(pause, |due| due.min(pause)))?;
    }
}

struct OnConnection<'a>(&'a mut PgConnection);

impl Locks for OnConnection<'_> {
    fn take_sleep(&mut self) -> Result<bool, StoreError> {
        query::try_lock(self.0, CLASS, SLEEP)
    }

    fn leave_sleep(&mut self) -> Result<(), StoreError> {
        query::unlock(self.0, CLASS, SLEEP)
    }

    fn all_have_notified(&mut self) -> Result<bool, StoreError> {
        let free = query::try_lock(self.0, CLASS, QUIET)?;
        if free {
            query::unlock(self.0, CLASS, QUIET)?;
        }
        Ok(free)
    }
}
