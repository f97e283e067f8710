//! What the crate logs, from all threads.

use std::io::{self, Write};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use tracing_subscriber::fmt::MakeWriter;

/// Somewhere in each line of the crate's own.
const OURS: &str = "diesel_outbox";

/// Everything that is logged, at every level, while this exists.
///
/// Threads belong to no test, so captures in one process take turns, and a test
/// beside this one that does not capture is heard as well: tests that count lines
/// share their file with none that log.
#[derive(Debug)]
pub struct Logs {
    _turn: MutexGuard<'static, ()>,
}

/// One event, with the spans around it and all fields.
#[derive(Clone, Debug)]
pub struct Line {
    /// When it was written.
    pub at: Instant,
    /// The level, then spans, target, message and fields.
    pub text: String,
}

impl Line {
    /// Whether the crate itself says this at `warn` or above.
    pub fn is_our_warning(&self) -> bool {
        let level = self.text.split_whitespace().next();
        matches!(level, Some("WARN" | "ERROR")) && self.text.contains(OURS)
    }
}

static TURN: Mutex<()> = Mutex::new(());
static LINES: Mutex<Vec<Line>> = Mutex::new(Vec::new());

impl Logs {
    /// Waits for its turn and begins with nothing.
    pub fn capture() -> Self {
        static SUBSCRIBER: Once = Once::new();
        SUBSCRIBER.call_once(|| {
            tracing_subscriber::fmt()
                .with_max_level(tracing::Level::TRACE)
                .with_ansi(false)
                .without_time()
                .with_writer(Capture)
                .init();
        });
        // A failed test before this one poisons nothing that matters.
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        stored().clear();
        Self { _turn: turn }
    }

    /// What was logged so far.
    pub fn lines(&self) -> Vec<Line> {
        stored().clone()
    }

    /// The crate's own lines at `warn` or above.
    pub fn our_warnings(&self) -> Vec<Line> {
        let mut lines = self.lines();
        lines.retain(Line::is_our_warning);
        lines
    }

    /// The most such lines within any one second.
    pub fn busiest_second(&self) -> usize {
        let lines = self.our_warnings();
        lines
            .iter()
            .map(|first| {
                let second = first.at..first.at + Duration::from_secs(1);
                lines
                    .iter()
                    .filter(|line| second.contains(&line.at))
                    .count()
            })
            .max()
            .unwrap_or(0)
    }

    /// Panics if `canary` was logged at any level by anybody.
    pub fn assert_without(&self, canary: &str) {
        for line in self.lines() {
            assert!(!line.text.contains(canary), "logged: {}", line.text);
        }
    }
}

fn stored() -> MutexGuard<'static, Vec<Line>> {
    LINES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes one whole event a write, as the formatter hands it over.
#[derive(Debug)]
struct Capture;

impl Write for Capture {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        stored().push(Line {
            at: Instant::now(),
            text: String::from_utf8_lossy(bytes).trim_end().to_owned(),
        });
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Capture {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        Self
    }
}
