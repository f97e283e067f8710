//! Arithmetic with instants that no setting can bring to a panic.

use std::time::{Duration, Instant};

/// `by` from now; beyond what the clock can tell, a century.
pub(crate) fn from_now(by: Duration) -> Instant {
    after(Instant::now(), by)
}

/// `by` after `instant`; beyond what the clock can tell, a century.
pub(crate) fn after(instant: Instant, by: Duration) -> Instant {
    const CENTURY: Duration = Duration::from_secs(100 * 366 * 86_400);
    instant.checked_add(by).unwrap_or_else(|| instant + CENTURY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instant_beyond_the_clock_is_far_away() {
        let now = Instant::now();
        assert_eq!(
            after(now, Duration::from_secs(1)),
            now + Duration::from_secs(1)
        );
        assert!(after(now, Duration::MAX) > now + Duration::from_secs(86_400 * 36_500));
    }
}
