//! The rate of a destination: a token for each row, taken before it is claimed.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ratelimit::{Ratelimiter, TryWaitError};

use super::config::ConfigError;

/// So many rows in a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RatePolicy {
    pub(crate) rows: u32,
    pub(crate) per: Duration,
}

impl RatePolicy {
    fn limiter(self) -> Option<Ratelimiter> {
        let rows = u64::from(self.rows);
        if rows == 0 {
            // Which the library takes for no limit.
            return None;
        }
        Ratelimiter::builder(rows)
            .period(self.per)
            .max_tokens(rows)
            .initial_available(rows)
            .build()
            .ok()
    }

    pub(crate) fn check(self) -> Result<(), ConfigError> {
        match self.limiter() {
            Some(_) => Ok(()),
            None => Err(ConfigError::new("rate")),
        }
    }
}

/// A bucket of tokens, and those that are out of it and not spent: a claim finds
/// less than it has tokens for. Both together never exceed what the bucket holds.
pub(crate) struct Rate {
    limiter: Ratelimiter,
    rows: usize,
    in_hand: Mutex<usize>,
}

impl Rate {
    /// `None` for a policy that [`RatePolicy::check`] refuses.
    pub(crate) fn new(policy: RatePolicy) -> Option<Self> {
        Some(Self {
            limiter: policy.limiter()?,
            rows: policy.rows as usize,
            in_hand: Mutex::new(0),
        })
    }

    fn lock(&self) -> MutexGuard<'_, usize> {
        self.in_hand.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many rows may be claimed, up to `wanted`, or how long until one may.
    pub(crate) fn room(&self, wanted: usize) -> Result<usize, Duration> {
        let mut in_hand = self.lock();
        let mut wait = Duration::ZERO;
        while *in_hand < wanted.min(self.rows) {
            match self.limiter.try_wait() {
                Ok(()) => *in_hand += 1,
                Err(TryWaitError::Insufficient(left)) => {
                    wait = left;
                    break;
                }
                Err(_) => break,
            }
        }
        self.limiter.set_max_tokens((self.rows - *in_hand) as u64);
        match *in_hand {
            0 => Err(wait),
            n => Ok(n.min(wanted)),
        }
    }

    /// Rows were claimed.
    pub(crate) fn spend(&self, rows: usize) {
        let mut in_hand = self.lock();
        // The bucket fills when it is asked: what it gains is capped by the room
        // that there was until now.
        let room = (self.rows - *in_hand) as u64;
        self.limiter.set_max_tokens(room.max(1));
        if self.limiter.try_wait_n(room.max(1)).is_ok() {
            *in_hand = self.rows;
        }
        *in_hand -= rows.min(*in_hand);
        self.limiter.set_max_tokens((self.rows - *in_hand) as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_that_were_not_spent_are_kept_and_add_nothing() {
        let per = Duration::from_secs(3600);
        let rate = Rate::new(RatePolicy { rows: 5, per }).unwrap();
        assert_eq!(rate.room(3), Ok(3));
        rate.spend(1);
        // Two in hand and two in the bucket, and no more than five at any time.
        assert_eq!(rate.room(100), Ok(4));
        rate.spend(4);
        let wait = rate.room(1).unwrap_err();
        assert!(wait > per / 10 && wait <= per / 5, "{wait:?}");
    }

    #[test]
    fn a_token_in_hand_is_not_earned_again_meanwhile() {
        let per = Duration::from_millis(50);
        let rate = Rate::new(RatePolicy { rows: 1, per }).unwrap();
        assert_eq!(rate.room(1), Ok(1));
        std::thread::sleep(2 * per);
        assert_eq!(rate.room(1), Ok(1));
        rate.spend(1);
        assert!(rate.room(1).is_err());
    }

    #[test]
    fn a_rate_of_nothing_is_refused() {
        let second = Duration::from_secs(1);
        let refused = |rows, per| RatePolicy { rows, per }.check().unwrap_err().field();
        assert_eq!(refused(0, second), "rate");
        assert_eq!(refused(1, Duration::ZERO), "rate");
        assert_eq!(
            RatePolicy {
                rows: 1,
                per: second
            }
            .check(),
            Ok(())
        );
    }
}
