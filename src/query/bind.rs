//! Values as the database takes them.

use std::time::Duration;

use diesel::pg::data_types::PgInterval;

/// A number of rows as the database takes it; one beyond its range saturates.
pub(crate) fn limit(rows: usize) -> i64 {
    i64::try_from(rows).unwrap_or(i64::MAX)
}

/// A length of time as the database takes it; one beyond its range saturates.
pub(crate) fn interval(duration: Duration) -> PgInterval {
    // A hundred years: no instant that is a century off means anything here,
    // and now plus a century is within what the column holds.
    const CENTURY: i64 = 100 * 366 * 86_400 * 1_000_000;
    let micros = i64::try_from(duration.as_micros()).unwrap_or(CENTURY);
    PgInterval::from_microseconds(micros.min(CENTURY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_of_time_saturates() {
        assert_eq!(interval(Duration::from_millis(5)).microseconds, 5_000);
        assert!(interval(Duration::MAX).microseconds > 0);
    }
}
