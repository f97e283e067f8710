//! Waiting for an event with a deadline, never for luck.

use std::time::{Duration, Instant};

/// Polls until `probe` answers, and panics with `what` after the deadline.
///
/// The environment variable `TEST_SLOWNESS` (a factor, 1 by default) stretches
/// every deadline for a slow machine.
pub fn eventually<T>(deadline: Duration, what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + stretched(deadline);
    loop {
        if let Some(answer) = probe() {
            return answer;
        }
        assert!(Instant::now() < end, "not within {deadline:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A deadline times `TEST_SLOWNESS`.
pub fn stretched(deadline: Duration) -> Duration {
    let factor = std::env::var("TEST_SLOWNESS")
        .ok()
        .and_then(|value| value.parse().ok())
        .unwrap_or(1.0);
    deadline.mul_f64(factor)
}
