//! How long to wait before the next attempt.

use std::time::Duration;

/// Exponential backoff with jitter, saturating at a maximum.
///
/// The ceiling for attempt *n* is `initial × multiplier^(n-1)`, at most `max`;
/// jitter then takes off a random part of it. The defaults are those of a
/// [`Destination`](crate::Destination): 1 s, doubled up to 1 h, full jitter, so
/// that rows which failed together do not come back together.
///
/// ```
/// use std::time::Duration;
/// use diesel_outbox::Backoff;
///
/// let backoff = Backoff::exponential(Duration::from_secs(1), Duration::from_secs(3600))
///     .with_jitter(0.0);
/// assert_eq!(backoff.delay(1), Duration::from_secs(1));
/// assert_eq!(backoff.delay(4), Duration::from_secs(8));
/// assert_eq!(backoff.delay(u32::MAX), Duration::from_secs(3600));
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Backoff {
    initial: Duration,
    max: Duration,
    multiplier: f64,
    jitter: f64,
}

impl Default for Backoff {
    fn default() -> Self {
        Self::exponential(Duration::from_secs(1), Duration::from_secs(3600))
    }
}

impl Backoff {
    /// Starts at `initial` and never waits longer than `max`. Doubles, with full
    /// jitter, unless told otherwise.
    #[must_use]
    pub const fn exponential(initial: Duration, max: Duration) -> Self {
        Self {
            initial,
            max,
            multiplier: 2.0,
            jitter: 1.0,
        }
    }

    /// What each further attempt multiplies the delay by. 1 keeps it constant;
    /// below 1 is refused. Default 2: a remote that is down sees half the
    /// requests with each round.
    #[must_use]
    pub const fn with_multiplier(mut self, multiplier: f64) -> Self {
        self.multiplier = multiplier;
        self
    }

    /// The part of the delay that is left to chance, from 0 (none, the exact
    /// delay) to 1 (anything between nothing and the delay). Default 1.
    #[must_use]
    pub const fn with_jitter(mut self, jitter: f64) -> Self {
        self.jitter = jitter;
        self
    }

    /// The longest delay after attempt `attempt` (1 is the first), before
    /// jitter. Never zero, never decreasing, never above the maximum.
    #[must_use]
    pub fn delay(&self, attempt: u32) -> Duration {
        let step = f64::from(attempt.saturating_sub(1));
        let seconds = self.initial.as_secs_f64() * self.multiplier.powf(step);
        if seconds.is_finite() && seconds < self.max.as_secs_f64() {
            Duration::from_secs_f64(seconds).min(self.max)
        } else {
            self.max
        }
    }

    /// A delay after attempt `attempt`, with jitter.
    #[must_use]
    pub fn jittered(&self, attempt: u32) -> Duration {
        let ceiling = self.delay(attempt);
        let seconds = ceiling.as_secs_f64() * (1.0 - self.jitter * unit_random());
        Duration::try_from_secs_f64(seconds).map_or(ceiling, |delay| delay.min(ceiling))
    }

    /// The delay that a remote asks for, within ours.
    pub(crate) fn clamped(&self, wish: Duration) -> Duration {
        wish.max(self.initial).min(self.max)
    }

    /// The name of the setting that makes no sense, if one does not.
    pub(crate) fn fault(&self) -> Option<&'static str> {
        if self.initial.is_zero() {
            Some("backoff.initial")
        } else if self.max < self.initial {
            Some("backoff.max")
        } else if !self.multiplier.is_finite() || self.multiplier < 1.0 {
            Some("backoff.multiplier")
        } else if !(0.0..=1.0).contains(&self.jitter) {
            Some("backoff.jitter")
        } else {
            None
        }
    }
}

/// A random wait from `least` to `most`.
pub(crate) fn between(least: Duration, most: Duration) -> Duration {
    least + most.saturating_sub(least).mul_f64(unit_random())
}

/// A random number in `0.0..1.0`, from the generator that makes our ids.
fn unit_random() -> f64 {
    let bits = (uuid::Uuid::new_v4().as_u128() & u128::from(u32::MAX)) as u32;
    f64::from(bits) / (f64::from(u32::MAX) + 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn the_delay_grows_and_saturates() {
        let backoff = Backoff::exponential(SECOND, HOUR).with_jitter(0.0);
        let mut last = Duration::ZERO;
        for attempt in [1, 2, 31, 32, 33, 40, 64, 1023, 1024, u32::MAX] {
            let delay = backoff.jittered(attempt);
            assert!(delay > Duration::ZERO && delay >= last && delay <= HOUR);
            if attempt >= 31 {
                assert_eq!(delay, HOUR);
            }
            last = delay;
        }
        assert_eq!(backoff.delay(0), SECOND);
    }

    #[test]
    fn a_wish_is_kept_within_the_bounds() {
        let backoff = Backoff::exponential(SECOND, HOUR);
        assert_eq!(backoff.clamped(Duration::ZERO), SECOND);
        assert_eq!(backoff.clamped(90 * SECOND), 90 * SECOND);
        assert_eq!(backoff.clamped(Duration::MAX), HOUR);
    }

    #[test]
    fn a_multiplier_of_one_keeps_the_delay() {
        let backoff = Backoff::exponential(SECOND, HOUR).with_multiplier(1.0);
        assert_eq!(backoff.delay(u32::MAX), SECOND);
        let forever = Backoff::exponential(Duration::MAX, Duration::MAX).with_jitter(0.0);
        assert_eq!(forever.jittered(u32::MAX), Duration::MAX);
    }

    #[test]
    fn full_jitter_stays_between_nothing_and_the_delay_and_varies() {
        let backoff = Backoff::exponential(SECOND, HOUR);
        let delays: Vec<_> = (0..100).map(|_| backoff.jittered(3)).collect();
        assert!(delays.iter().all(|d| *d <= 4 * SECOND));
        assert!(delays.iter().any(|d| *d < 2 * SECOND));
        assert!(delays.iter().any(|d| *d > 2 * SECOND));
    }

    #[test]
    fn a_setting_without_sense_is_named() {
        let ok = Backoff::exponential(SECOND, HOUR);
        assert_eq!(ok.fault(), None);
        assert_eq!(
            Backoff::exponential(Duration::ZERO, HOUR).fault(),
            Some("backoff.initial")
        );
        assert_eq!(
            Backoff::exponential(HOUR, SECOND).fault(),
            Some("backoff.max")
        );
        for multiplier in [0.99, f64::NAN, f64::INFINITY, -1.0] {
            assert_eq!(
                ok.with_multiplier(multiplier).fault(),
                Some("backoff.multiplier")
            );
        }
        for jitter in [-0.1, 1.1, f64::NAN] {
            assert_eq!(ok.with_jitter(jitter).fault(), Some("backoff.jitter"));
        }
    }
}
