//! What the threads of one dispatcher share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};

use super::backend::{Answer, Backend, Fence, Outcome, ProbeFence};
use super::bell::{Bell, knock};
use super::breaker::Turn;
use super::flight::Flights;
use super::guard::{self, Guarded, Guards};
use super::lane::Lane;
use super::stats::{Counters, add};

/// What goes to the settler.
#[derive(Debug)]
pub(crate) enum Report {
    Outcome {
        lane: usize,
        fence: Fence,
        outcome: Outcome,
        /// Whether it frees a slot: the answer of an abandoned call does not.
        slot: bool,
    },
    Answer {
        lane: usize,
        fence: ProbeFence,
        answer: Answer,
    },
}

pub(crate) struct Shared {
    pub(crate) worker_id: String,
    pub(crate) guards: Arc<Guards>,
    pub(crate) lanes: Vec<Lane>,
    pub(crate) flights: Flights,
    pub(crate) counters: Counters,
    pub(crate) batch: usize,
    pub(crate) lease: Duration,
    pub(crate) poll: Duration,
    pub(crate) foreign_lease: Duration,
    pub(crate) maintenance: Duration,
    /// Nothing new is begun.
    pub(crate) stopping: AtomicBool,
    /// Leases can be renewed: else nothing is claimed.
    pub(crate) renewing: AtomicBool,
    pub(crate) reports: Sender<Report>,
    pub(crate) bell: Arc<Bell>,
    ask: Sender<()>,
    exits: Sender<&'static str>,
    /// Disconnected when the threads are to end.
    pub(crate) closed: Receiver<()>,
}

/// The ends of channels that are not shared.
#[derive(Clone)]
pub(crate) struct Ends {
    pub(crate) reports: Receiver<Report>,
    pub(crate) wake: Receiver<()>,
    pub(crate) ask: Receiver<()>,
    pub(crate) exits: Receiver<&'static str>,
    pub(crate) close: Sender<()>,
}

impl Shared {
    pub(crate) fn new(
        builder: &super::config::DispatcherBuilder,
        worker_id: String,
        backend: Arc<dyn Backend>,
    ) -> (Arc<Self>, Ends) {
        let (reports, report_end) = crossbeam_channel::unbounded();
        let (wake, wake_end) = crossbeam_channel::bounded(1);
        let (ask, ask_end) = crossbeam_channel::bounded(1);
        let (exits, exit_end) = crossbeam_channel::unbounded();
        let (close, closed) = crossbeam_channel::bounded(0);
        let lanes = builder
            .destinations
            .iter()
            .enumerate()
            .map(|(number, destination)| Lane::new(number, destination.clone(), builder.batch))
            .collect();
        let counters = Counters::default();
        let guards = Guards::new(
            backend,
            guard::deadline(builder.lease),
            closed.clone(),
            Arc::clone(&counters.abandoned_sessions),
        );
        let shared = Self {
            worker_id,
            guards: Arc::new(guards),
            lanes,
            flights: Flights::default(),
            counters,
            batch: builder.batch,
            lease: builder.lease,
            poll: builder.poll,
            foreign_lease: builder.foreign_lease,
            maintenance: builder.maintenance,
            stopping: AtomicBool::new(false),
            renewing: AtomicBool::new(true),
            reports,
            bell: Arc::new(Bell::new(wake, closed.clone())),
            ask,
            exits,
            closed,
        };
        (
            Arc::new(shared),
            Ends {
                reports: report_end,
                wake: wake_end,
                ask: ask_end,
                exits: exit_end,
                close,
            },
        )
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// A session for one thread, which answers by a deadline.
    pub(crate) fn session(&self, role: &'static str) -> Guarded {
        Guarded::new(Arc::clone(&self.guards), role)
    }

    /// Makes the claimer look again. One nudge that waits is as good as many.
    pub(crate) fn nudge(&self) {
        self.bell.ring();
    }

    /// Makes maintenance look for more unknown outcomes to ask about: there are
    /// reconcilers free again.
    pub(crate) fn ask_more(&self) {
        knock(&self.ask);
    }

    /// Tells the breaker of a lane how a call ended.
    pub(crate) fn record(&self, lane: usize, answered: bool) {
        if self.lanes[lane].record(answered, Instant::now()) == Turn::Opened {
            add(&self.counters.breaker_opened, 1);
        }
    }

    /// Hands a row to the settler without a call, or with its call over.
    pub(crate) fn settle(&self, lane: usize, fence: Fence, outcome: Outcome) {
        self.flights.settling(fence);
        self.report(lane, fence, outcome, true);
    }

    pub(crate) fn report(&self, lane: usize, fence: Fence, outcome: Outcome, slot: bool) {
        // The settler outlives all who report; if it is gone, so is the process.
        let _ = self.reports.send(Report::Outcome {
            lane,
            fence,
            outcome,
            slot,
        });
    }

    /// Hands back every row that waits for a worker, and forgets every question
    /// that waits for a reconciler.
    pub(crate) fn hand_back_waiting(&self) {
        for (index, lane) in self.lanes.iter().enumerate() {
            while let Ok((fence, _)) = lane.jobs.1.try_recv() {
                self.settle(index, fence, Outcome::GiveBack);
            }
            while let Ok((fence, _)) = lane.questions.1.try_recv() {
                self.flights.question_done(fence.outbox_id);
            }
        }
    }

    /// Gives up calls, all or those whose time is over; returns how many.
    pub(crate) fn give_up_calls(&self, now: Option<Instant>, code: &'static str) -> Vec<usize> {
        // An overdue call still running may yet take effect; nobody is asked
        // about its row while it does, within reason.
        let quiet = |lane: usize| self.lanes[lane].destination.send_timeout.saturating_mul(10);
        let given = self.flights.give_up(now, quiet);
        for (lane, fence) in &given {
            let unknown = Outcome::Unknown {
                code: Some(code),
                remote_ref: None,
            };
            self.lanes[*lane].abandoned.fetch_add(1, Ordering::AcqRel);
            self.lanes[*lane].workers.fetch_sub(1, Ordering::AcqRel);
            add(&self.counters.abandoned, 1);
            self.report(*lane, *fence, unknown, true);
        }
        given.into_iter().map(|(lane, _)| lane).collect()
    }

    /// Starts a thread that says when it ends.
    pub(crate) fn spawn(
        self: &Arc<Self>,
        name: &'static str,
        body: impl FnOnce(Arc<Self>) + Send + 'static,
    ) -> bool {
        let exit = Exit {
            name,
            exits: self.exits.clone(),
        };
        let shared = Arc::clone(self);
        let thread = std::thread::Builder::new().name(format!("outbox-{name}"));
        let spawned = thread.spawn(move || {
            let _exit = exit;
            body(shared);
        });
        if spawned.is_err() {
            tracing::error!(thread = name, "a thread could not be started");
        }
        spawned.is_ok()
    }
}

struct Exit {
    name: &'static str,
    exits: Sender<&'static str>,
}

impl Drop for Exit {
    fn drop(&mut self) {
        let _ = self.exits.send(self.name);
    }
}

/// Says once that something fails and once that it works again, not per try.
#[derive(Debug)]
pub(crate) struct Trouble {
    role: &'static str,
    since: Option<Instant>,
    wait: Duration,
}

impl Trouble {
    const FIRST: Duration = Duration::from_millis(50);
    const LONGEST: Duration = Duration::from_secs(1);

    pub(crate) const fn new(role: &'static str) -> Self {
        Self {
            role,
            since: None,
            wait: Self::FIRST,
        }
    }

    /// How long to wait before the next try.
    pub(crate) fn failed(&mut self, error: crate::error::StoreError) -> Duration {
        if self.since.is_none() {
            self.since = Some(Instant::now());
            tracing::warn!(role = self.role, %error, "the outbox dispatcher cannot reach its table");
        }
        let wait = self.wait;
        self.wait = (wait * 2).min(Self::LONGEST);
        wait
    }

    pub(crate) const fn is_on(&self) -> bool {
        self.since.is_some()
    }

    pub(crate) fn works(&mut self) {
        if let Some(since) = self.since.take() {
            self.wait = Self::FIRST;
            tracing::info!(
                role = self.role,
                seconds = since.elapsed().as_secs_f64(),
                "the outbox dispatcher reaches its table again"
            );
        }
    }
}
