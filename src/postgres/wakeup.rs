//! LISTEN: hearing that rows were inserted.
//!
//! The listening connection only makes the dispatcher faster; the poll is what
//! makes it sure. So a lost connection is said once, and made again quietly.

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};
use diesel::RunQueryDsl;

use super::connection::Connection;
use crate::error::StoreError;
use crate::query::{CHANNEL, OrStoreError, Phase};

/// Diesel cannot block until a notification comes, so it is asked for: this
/// often while they come …
const BUSY: Duration = Duration::from_millis(1);
/// … and this often when none has come for a while.
const IDLE: Duration = Duration::from_millis(10);
/// A connection that died without a word is found by asking it something.
const CHECK: Duration = Duration::from_secs(10);
const RECONNECT: Duration = Duration::from_millis(500);

pub(super) fn listen(mut connection: Connection, closed: &Receiver<()>, nudge: &dyn Fn()) {
    let mut failing = false;
    loop {
        let Err(error) = hear(&mut connection, closed, &mut failing, nudge) else {
            return;
        };
        connection.close();
        if !failing {
            tracing::warn!(%error, "the outbox listener lost its connection; polling meanwhile");
            failing = true;
        }
        if let Ok(()) | Err(RecvTimeoutError::Disconnected) = closed.recv_timeout(RECONNECT) {
            return;
        }
    }
}

/// Listens until `closed`, which is `Ok`, or until the connection fails.
fn hear(
    connection: &mut Connection,
    closed: &Receiver<()>,
    failing: &mut bool,
    nudge: &dyn Fn(),
) -> Result<(), StoreError> {
    let conn = connection.get()?;
    diesel::sql_query(format!("LISTEN {CHANNEL}"))
        .execute(conn)
        .or_store_error(Phase::Read)?;
    if std::mem::take(failing) {
        tracing::info!("the outbox listener is connected again");
    }
    // Rows may have come while nobody listened.
    nudge();
    let mut heard = Instant::now();
    let mut asked = Instant::now();
    loop {
        let mut any = false;
        for notification in conn.notifications_iter() {
            notification.or_store_error(Phase::Read)?;
            any = true;
        }
        if any {
            heard = Instant::now();
            nudge();
        }
        if asked.elapsed() > CHECK {
            asked = Instant::now();
            diesel::sql_query("SELECT 1")
                .execute(conn)
                .or_store_error(Phase::Read)?;
        }
        let pause = if heard.elapsed() < Duration::from_secs(1) {
            BUSY
        } else {
            IDLE
        };
        if let Ok(()) | Err(RecvTimeoutError::Disconnected) = closed.recv_timeout(pause) {
            return Ok(());
        }
    }
}
