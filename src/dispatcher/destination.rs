//! A remote system, and what is known about it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::breaker::BreakerPolicy;
use super::config::ConfigError;
use super::rate::RatePolicy;
use crate::backoff::Backoff;
use crate::claim::KeyPolicy;
use crate::sender::{OutboxReconciler, OutboxSender};

/// What becomes of a row whose outcome is unknown: the destination's choice,
/// because no default is honest for every remote.
#[derive(Clone)]
pub(crate) enum Kind {
    Idempotent,
    Reconciled(Arc<dyn OutboxReconciler>),
    Manual,
}

/// One remote system: how it is called, and what its unknown outcomes become.
///
/// | constructor | the remote … | an unknown row is then |
/// |---|---|---|
/// | [`idempotent`](Self::idempotent) | deduplicates on the idempotency key | put back with backoff and the same key |
/// | [`reconciled`](Self::reconciled) | can be asked | settled, resent or left, as the reconciler answers |
/// | [`manual`](Self::manual) | can be neither | kept until an operator resolves it |
#[derive(Clone)]
#[must_use]
pub struct Destination {
    pub(crate) name: String,
    pub(crate) sender: Arc<dyn OutboxSender>,
    pub(crate) kind: Kind,
    pub(crate) concurrency: usize,
    pub(crate) prefetch: Option<usize>,
    pub(crate) send_timeout: Duration,
    pub(crate) settle_delay: Option<Duration>,
    pub(crate) backoff: Backoff,
    pub(crate) probe_backoff: Backoff,
    pub(crate) probes: usize,
    pub(crate) max_probes: u32,
    pub(crate) max_attempts: u32,
    pub(crate) max_abandoned: usize,
    pub(crate) on_failure: KeyPolicy,
    pub(crate) rate: Option<RatePolicy>,
    pub(crate) breaker: Option<BreakerPolicy>,
}

impl Destination {
    /// The remote recognises a repeated idempotency key and does nothing twice.
    pub fn idempotent(name: impl Into<String>, sender: impl OutboxSender + 'static) -> Self {
        Self::new(name.into(), Arc::new(sender), Kind::Idempotent)
    }

    /// The remote can be asked what became of a request.
    pub fn reconciled(
        name: impl Into<String>,
        sender: impl OutboxSender + 'static,
        reconciler: impl OutboxReconciler + 'static,
    ) -> Self {
        Self::new(
            name.into(),
            Arc::new(sender),
            Kind::Reconciled(Arc::new(reconciler)),
        )
    }

    /// The remote can do neither: an unknown outcome waits for a person, who
    /// resolves it with [`mark_completed`](crate::mark_completed),
    /// [`mark_failed`](crate::mark_failed) or
    /// [`reschedule`](crate::reschedule). Its rows are never claimed ahead of a
    /// free worker, so that a claim is the start of a call.
    pub fn manual(name: impl Into<String>, sender: impl OutboxSender + 'static) -> Self {
        Self::new(name.into(), Arc::new(sender), Kind::Manual)
    }

    fn new(name: String, sender: Arc<dyn OutboxSender>, kind: Kind) -> Self {
        Self {
            name,
            sender,
            kind,
            concurrency: 8,
            prefetch: None,
            send_timeout: Duration::from_secs(30),
            settle_delay: None,
            backoff: Backoff::default(),
            probe_backoff: Backoff::default(),
            probes: 4,
            max_probes: 100,
            max_attempts: 20,
            max_abandoned: 8,
            on_failure: KeyPolicy::Pass,
            rate: None,
            breaker: None,
        }
    }

    /// How many calls run at once, each on a thread. Zero is refused. Default 8:
    /// enough to hide a remote's latency without surprising it.
    pub fn with_concurrency(mut self, concurrency: usize) -> Self {
        self.concurrency = concurrency;
        self
    }

    /// How many rows are claimed beyond those that workers are free for. 0 means
    /// that a claim is the start of a call; it is always 0 for
    /// [`manual`](Self::manual). Default: one batch while calls take less than
    /// 10 ms, else none, so that rows do not age in one process while another is
    /// idle.
    pub fn with_prefetch(mut self, rows: usize) -> Self {
        self.prefetch = Some(rows);
        self
    }

    /// How long a call may take. When it is over, the row's outcome is unknown
    /// and the thread is left to finish; a late answer is still used. Zero is
    /// refused. Default 30 s: longer than any HTTP client should wait.
    pub fn with_send_timeout(mut self, timeout: Duration) -> Self {
        self.send_timeout = timeout;
        self
    }

    /// How long an outcome must have been unknown before anybody asks about it
    /// or sends it again: a request that was given up may still land. Zero asks
    /// at once. Default: `send_timeout` for [`reconciled`](Self::reconciled);
    /// zero for [`idempotent`](Self::idempotent), whose rows then wait for the
    /// ordinary backoff.
    pub fn with_settle_delay(mut self, delay: Duration) -> Self {
        self.settle_delay = Some(delay);
        self
    }

    /// The wait between attempts. Settings without sense are refused. Default:
    /// [`Backoff::default`].
    pub fn with_backoff(mut self, backoff: Backoff) -> Self {
        self.backoff = backoff;
        self
    }

    /// The wait from an answer of [`Unresolved`](crate::Reconciled::Unresolved)
    /// to the next question about the same row. A question that is not answered
    /// within `send_timeout`, because its process is gone, is asked again after
    /// this wait too. Settings without sense are refused. Default:
    /// [`Backoff::default`].
    pub fn with_probe_backoff(mut self, backoff: Backoff) -> Self {
        self.probe_backoff = backoff;
        self
    }

    /// How many questions the reconciler is asked at once, each on a thread.
    /// Zero is refused. Default 4: a remote that has just failed is asked
    /// gently.
    pub fn with_probes(mut self, probes: usize) -> Self {
        self.probes = probes;
        self
    }

    /// How often the reconciler is asked about one row in its life. After that many
    /// questions without a resolution the row stays unknown, with
    /// [`code::UNRESOLVED`](crate::code::UNRESOLVED) as its last failure, and waits
    /// for an operator. Zero is refused. Default 100: about two days at the default
    /// backoff, by when a person has been asked for.
    pub fn with_max_probes(mut self, probes: u32) -> Self {
        self.max_probes = probes;
        self
    }

    /// Attempts before a retryable answer becomes final: the row is then
    /// `failed` with the sender's last code. A row whose outcome is unknown is
    /// never failed by it, but kept for an operator. Zero is refused. Default
    /// 20: nearly nine hours at the default backoff.
    pub fn with_max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = attempts;
        self
    }

    /// How many threads may hang in calls that timed out. At the cap nothing
    /// more is claimed for this destination until one comes back. Zero is
    /// refused. Default 8: as many as work at once.
    pub fn with_max_abandoned(mut self, threads: usize) -> Self {
        self.max_abandoned = threads;
        self
    }

    /// At most `rows` calls begin in `per`, on the average and by each dispatcher:
    /// a token bucket that holds `rows` tokens and is full at the start. Without a
    /// token nothing is claimed, so no attempt is spent on waiting, and nothing is
    /// prefetched. Zero of either is refused. Default: no limit.
    pub fn with_rate(mut self, rows: u32, per: Duration) -> Self {
        self.rate = Some(RatePolicy { rows, per });
        self
    }

    /// A circuit breaker: after `failures` calls in a row that were not answered
    /// (retryable, unknown, timed out, panicked) nothing is claimed for `open_for`,
    /// so that an outage of the remote costs no attempts. Then one call is let
    /// through; if it is answered, be it with a refusal, all are again. Rows that
    /// wait for a worker when it opens are handed back. Zero of either is refused.
    /// Default: none, for only the application knows how patient its remote is.
    pub fn with_breaker(mut self, failures: u32, open_for: Duration) -> Self {
        self.breaker = Some(BreakerPolicy { failures, open_for });
        self
    }

    /// What a failed row means for the later rows of its ordering key. It says
    /// nothing about rows without one. Default [`KeyPolicy::Pass`]: a row that the
    /// remote refuses holds up nobody for ever.
    pub fn on_failure(mut self, policy: KeyPolicy) -> Self {
        self.on_failure = policy;
        self
    }

    /// When an unknown outcome may first be asked about.
    pub(crate) fn settle_delay(&self) -> Duration {
        self.settle_delay.unwrap_or(match self.kind {
            Kind::Reconciled(_) => self.send_timeout,
            Kind::Idempotent | Kind::Manual => Duration::ZERO,
        })
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let fault = if self.name.is_empty() || self.name.len() > 255 || self.name.contains('\0') {
            Some("destination.name")
        } else if self.concurrency == 0 {
            Some("concurrency")
        } else if self.probes == 0 {
            Some("probes")
        } else if self.max_probes == 0 {
            Some("max_probes")
        } else if self.send_timeout.is_zero() {
            Some("send_timeout")
        } else if self.max_attempts == 0 {
            Some("max_attempts")
        } else if self.max_abandoned == 0 {
            Some("max_abandoned")
        } else {
            self.backoff.fault().or_else(|| self.probe_backoff.fault())
        };
        if let Some(field) = fault {
            return Err(ConfigError::new(field));
        }
        if let Some(rate) = self.rate {
            rate.check()?;
        }
        match self.breaker {
            Some(breaker) if breaker.failures == 0 => Err(ConfigError::new("breaker.failures")),
            Some(breaker) if breaker.open_for.is_zero() => {
                Err(ConfigError::new("breaker.open_for"))
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Destination")
            .field("concurrency", &self.concurrency)
            .field("send_timeout", &self.send_timeout)
            .field("max_attempts", &self.max_attempts)
            .finish_non_exhaustive()
    }
}
