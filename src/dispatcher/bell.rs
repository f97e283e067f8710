//! The line between the claimer and whoever hears of new rows.
//!
//! A claimer that finds nothing sleeps. How long it may sleep without missing a
//! row depends on what is sure to wake it, and that is for the listener to find
//! out: it asks for looks, is told what they found, and sets how long the claimer
//! may rest.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TrySendError, bounded};

/// How long the claimer rests while nobody answers for waking it.
pub(crate) const UNHEARD: Duration = Duration::from_secs(1);
/// A listener that has said nothing for this long is no longer trusted.
const DEAF: Duration = Duration::from_secs(3);

/// The claimer's side; see the module.
pub(crate) struct Bell {
    wake: Sender<()>,
    told: (Sender<()>, Receiver<()>),
    closed: Receiver<()>,
    born: Instant,
    /// The number of the last look that was asked for.
    asked: AtomicU64,
    /// The last look that was asked for before a look which found nothing began.
    fruitless: AtomicU64,
    /// How many looks found something, or no room for it.
    fruitful: AtomicU64,
    /// What the last look found, so that a busy claimer tells its news once.
    busy: AtomicBool,
    /// How long the claimer may rest, in ms.
    rest: AtomicU64,
    /// When the listener last said that it hears, in ms from `born`.
    heard: AtomicU64,
    /// Since when the listener has been busy with something that may not end, in
    /// ms from `born`.
    busy_since: AtomicU64,
    /// Which listener is believed: one that was replaced is not.
    ear: AtomicU64,
}

/// The listener's side.
pub(crate) struct Ear {
    bell: Arc<Bell>,
    number: u64,
}

impl Bell {
    pub(crate) fn new(wake: Sender<()>, closed: Receiver<()>) -> Self {
        Self {
            wake,
            told: bounded(1),
            closed,
            born: Instant::now(),
            asked: AtomicU64::new(0),
            fruitless: AtomicU64::new(0),
            fruitful: AtomicU64::new(0),
            busy: AtomicBool::new(false),
            rest: AtomicU64::new(millis(UNHEARD)),
            heard: AtomicU64::new(0),
            busy_since: AtomicU64::new(u64::MAX),
            ear: AtomicU64::new(0),
        }
    }

    /// For a listener that takes the place of whoever listened before.
    pub(crate) fn ear(self: &Arc<Self>) -> Ear {
        self.busy_since.store(self.now(), Ordering::Release);
        self.rest.store(millis(UNHEARD), Ordering::Release);
        Ear {
            number: self.ear.fetch_add(1, Ordering::AcqRel) + 1,
            bell: Arc::clone(self),
        }
    }

    /// How long the listener has been busy with one thing.
    pub(crate) fn silent_for(&self) -> Duration {
        let since = self.busy_since.load(Ordering::Acquire);
        Duration::from_millis(self.now().saturating_sub(since))
    }

    fn now(&self) -> u64 {
        millis(self.born.elapsed())
    }

    /// Makes the claimer look. One call that waits is as good as many.
    pub(crate) fn ring(&self) {
        knock(&self.wake);
    }

    /// For the claimer: the ticket to hand in with [`looked`](Self::looked), to be
    /// taken before the look.
    pub(crate) fn ticket(&self) -> u64 {
        self.asked.load(Ordering::Acquire)
    }

    /// For the claimer: what a look found.
    pub(crate) fn looked(&self, ticket: u64, found: Found) {
        let busy = found == Found::Something;
        match found {
            Found::Nothing => self.fruitless.store(ticket, Ordering::Release),
            Found::Something => {
                self.fruitful.fetch_add(1, Ordering::AcqRel);
            }
        }
        if !self.busy.swap(busy, Ordering::AcqRel) || !busy {
            knock(&self.told.0);
        }
    }

    /// For the claimer: how long it may rest, as things are now.
    pub(crate) fn rest(&self) -> Duration {
        let rest = Duration::from_millis(self.rest.load(Ordering::Acquire));
        match self.is_deaf() {
            true => rest.min(UNHEARD),
            false => rest,
        }
    }

    fn is_deaf(&self) -> bool {
        let heard = Duration::from_millis(self.heard.load(Ordering::Acquire));
        self.born.elapsed().saturating_sub(heard) > DEAF
    }
}

impl Ear {
    /// Makes the claimer look.
    pub(crate) fn ring(&self) {
        self.bell.ring();
    }

    /// Whether another has taken its place.
    fn is_replaced(&self) -> bool {
        self.bell.ear.load(Ordering::Acquire) != self.number
    }

    /// Asks for a look that begins from now on; see [`fruitless`](Self::fruitless).
    pub(crate) fn ask(&self) -> u64 {
        let ticket = self.bell.asked.fetch_add(1, Ordering::AcqRel) + 1;
        self.ring();
        ticket
    }

    /// Whether a look that began after [`ask`](Self::ask) gave out `ticket` found
    /// nothing.
    pub(crate) fn fruitless(&self, ticket: u64) -> bool {
        self.bell.fruitless.load(Ordering::Acquire) >= ticket
    }

    /// How many looks found something so far.
    pub(crate) fn fruitful(&self) -> u64 {
        self.bell.fruitful.load(Ordering::Acquire)
    }

    /// How long the claimer may rest from its next look on.
    pub(crate) fn allow_rest(&self, rest: Duration) {
        if !self.is_replaced() {
            self.bell.rest.store(millis(rest), Ordering::Release);
        }
    }

    /// Whether the last look found nothing.
    pub(crate) fn is_idle(&self) -> bool {
        !self.bell.busy.load(Ordering::Acquire)
    }

    /// Nobody listens, and that is as it should be: the claimer polls.
    pub(crate) fn poll_only(&self) {
        self.bell.heard.store(u64::MAX, Ordering::Release);
        self.bell.busy_since.store(u64::MAX, Ordering::Release);
        self.allow_rest(Duration::MAX);
    }

    /// The listener is alive and hears.
    pub(crate) fn hears(&self) {
        if !self.is_replaced() {
            self.bell.heard.store(self.bell.now(), Ordering::Release);
        }
    }

    /// Waits, at most `pause`, until the claimer has told something. `Err`: it is
    /// over, or another listens.
    pub(crate) fn pause(&self, pause: Duration) -> Result<(), Closed> {
        self.parked(|bell| {
            crossbeam_channel::select! {
                recv(bell.told.1) -> _ => Ok(()),
                recv(bell.closed) -> _ => Err(Closed),
                default(pause) => Ok(()),
            }
        })
    }

    /// Waits as long as it takes; `Err`: it is over, or another listens. Unlike
    /// [`pause`](Self::pause) it is not cut short by the claimer.
    pub(crate) fn wait(&self, wait: Duration) -> Result<(), Closed> {
        self.parked(|bell| match bell.closed.recv_timeout(wait) {
            Err(RecvTimeoutError::Timeout) => Ok(()),
            Ok(()) | Err(RecvTimeoutError::Disconnected) => Err(Closed),
        })
    }

    /// Waits for word on either channel, at most `pause`; whether it came.
    pub(crate) fn listen_to(
        &self,
        channels: [&Receiver<()>; 2],
        pause: Duration,
    ) -> Result<bool, Closed> {
        let mut heard = false;
        self.parked(|bell| {
            crossbeam_channel::select! {
                recv(channels[0]) -> word => heard = word.is_ok(),
                recv(channels[1]) -> word => heard = word.is_ok(),
                recv(bell.closed) -> _ => return Err(Closed),
                default(pause) => {}
            }
            Ok(())
        })?;
        Ok(heard)
    }

    /// A wait of ours is sure to end, and is no silence.
    fn parked(&self, wait: impl FnOnce(&Bell) -> Result<(), Closed>) -> Result<(), Closed> {
        if self.is_replaced() {
            return Err(Closed);
        }
        self.bell.busy_since.store(u64::MAX, Ordering::Release);
        let waited = wait(&self.bell);
        if self.is_replaced() {
            return Err(Closed);
        }
        self.bell
            .busy_since
            .store(self.bell.now(), Ordering::Release);
        waited
    }
}

/// What a look found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    Nothing,
    /// Rows, or no room for rows.
    Something,
}

/// The dispatcher ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Closed;

/// Leaves word that something is to be done. Word that waits is as good as more.
/// `false`: nobody is there any more.
pub(crate) fn knock(door: &Sender<()>) -> bool {
    !matches!(door.try_send(()), Err(TrySendError::Disconnected(())))
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
