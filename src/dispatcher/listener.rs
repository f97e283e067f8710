//! Keeping somebody at the bell: a listener that the database holds up is left
//! behind and replaced, like a session.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, select};

use super::bell::UNHEARD;
use super::guard::ENDING;
use super::shared::Shared;

/// Longer than connecting may take. The claimer has stopped trusting the listener
/// long before.
const SILENCE: Duration = Duration::from_secs(15);
/// A listener that ended by itself, for a panic, is replaced after this.
const AGAIN: Duration = Duration::from_secs(1);

pub(crate) fn keep_listening(shared: &Arc<Shared>) {
    loop {
        let (ended, left) = listen(shared);
        loop {
            select! {
                recv(ended) -> _ => break,
                recv(shared.closed) -> _ => {
                    let _ = ended.recv_timeout(ENDING);
                    return;
                }
                default(UNHEARD) => {}
            }
            if shared.bell.silent_for() > SILENCE && !shared.guards.is_full() {
                shared.guards.left_behind();
                left.store(true, Ordering::Release);
                break;
            }
        }
        if !left.load(Ordering::Acquire) && shared.closed.recv_timeout(AGAIN).is_err_and(is_closed)
        {
            return;
        }
    }
}

const fn is_closed(error: crossbeam_channel::RecvTimeoutError) -> bool {
    matches!(error, crossbeam_channel::RecvTimeoutError::Disconnected)
}

/// Starts a listener; says when it has ended, and takes word that nobody waits for
/// it.
fn listen(shared: &Arc<Shared>) -> (Receiver<()>, Arc<AtomicBool>) {
    let (ending, ended) = bounded(0);
    let left = Arc::new(AtomicBool::new(false));
    let (guards, ear) = (Arc::clone(&shared.guards), shared.bell.ear());
    let was_left = Arc::clone(&left);
    let thread = std::thread::Builder::new().name("outbox-ear".to_owned());
    let spawned = thread.spawn(move || {
        let _ending: Sender<()> = ending;
        guards.backend().listen(&ear);
        if was_left.load(Ordering::Acquire) {
            guards.came_back();
        }
    });
    if spawned.is_err() {
        tracing::error!(thread = "ear", "a thread could not be started");
    }
    (ended, left)
}
