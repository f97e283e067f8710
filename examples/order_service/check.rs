//! The checker: a process that has no part in the story, and believes only the
//! ledger's file and the table.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use chrono::{DateTime, Utc};
use diesel::prelude::*;
use diesel_outbox::schema::tf_outbox;
use serde_json::Value;

use crate::{Outcome, end_with_parent, orders};

/// What the ledger says.
#[derive(Default)]
struct Ledger {
    /// By key: when each effect was applied, in µs, and with what.
    effects: HashMap<String, Vec<(i64, Value)>>,
    faults: HashMap<String, u64>,
}

fn read(path: &str) -> Outcome<Ledger> {
    let mut ledger = Ledger::default();
    for line in fs::read_to_string(path)?.lines() {
        let mut line: Value = serde_json::from_str(line)?;
        if let Some(fault) = line["fault"].as_str() {
            *ledger.faults.entry(fault.to_owned()).or_default() += 1;
            continue;
        }
        let key = line["key"].as_str().unwrap_or_default().to_owned();
        let at = line["at"].as_i64().unwrap_or_default();
        let payload = line["payload"].take();
        ledger.effects.entry(key).or_default().push((at, payload));
    }
    Ok(ledger)
}

pub(crate) fn run(url: &str, ledger: &str, path: &str, seen: &str) -> Outcome {
    end_with_parent(|| {});
    let ledger = read(ledger)?;
    let orders = orders::read(Path::new(path))?;
    let seen: HashMap<String, u64> = serde_json::from_str(seen)?;
    let seen = |name: &str| seen.get(name).copied().unwrap_or(0);
    let fault = |name: &str| ledger.faults.get(name).copied().unwrap_or(0);
    let mut conn =
        PgConnection::establish(url).map_err(|_| "the checker cannot reach the database")?;

    println!("\nWhat became of the rows:");
    let mut unknown_left = 0;
    let by_status: Vec<(String, i64)> = tf_outbox::table
        .group_by(tf_outbox::status)
        .select((tf_outbox::status, diesel::dsl::count_star()))
        .order(tf_outbox::status)
        .load(&mut conn)?;
    for (status, n) in &by_status {
        println!("  {status:<16} {n:>6}");
        if status == "outcome_unknown" {
            unknown_left = *n;
        }
    }
    println!("Answers that were lost, and how each was resolved:");
    println!(
        "  the remote had it, says the reconciler    {:>6}",
        seen("reconciled")
    );
    println!(
        "  the remote never had it: sent again       {:>6}",
        seen("resent")
    );
    println!(
        "  the answer came late and was used         {:>6}",
        seen("late_answers")
    );

    let enqueued: HashMap<String, DateTime<Utc>> = tf_outbox::table
        .select((tf_outbox::idempotency_key, tf_outbox::enqueued_at))
        .load(&mut conn)?
        .into_iter()
        .collect();
    let mut waits: Vec<i64> = ledger
        .effects
        .iter()
        .filter_map(|(key, effects)| {
            Some(effects.first()?.0 - enqueued.get(key)?.timestamp_micros())
        })
        .collect();
    waits.sort_unstable();
    let quantile = |q: f64| {
        let i = ((waits.len() as f64 * q) as usize).min(waits.len().saturating_sub(1));
        waits.get(i).map_or(0.0, |us| *us as f64 / 1_000.0)
    };
    println!(
        "From the row's insert (the server's clock) to its effect (the ledger's): p50 {:.1} ms, p99 {:.1} ms",
        quantile(0.50),
        quantile(0.99)
    );

    let mut changed = 0;
    let (mut lost, mut doubled) = (0, 0);
    for (n, order) in orders.iter().enumerate() {
        match ledger.effects.get(&orders::key(n)).map(Vec::as_slice) {
            None | Some([]) => lost += 1,
            Some(effects) => {
                doubled += effects.len() - 1;
                changed += usize::from(effects.iter().any(|(_, payload)| payload != order));
            }
        }
    }
    if changed > 0 {
        println!("{changed} payloads did not arrive as they were posted");
    }
    let total = orders.len();
    let effects: usize = ledger.effects.values().map(Vec::len).sum();
    let faults = [
        ("killed", seen("killed")),
        ("lapsed", seen("lapsed")),
        ("reset_after_effect", fault("reset_after_effect")),
        ("late", fault("late")),
        ("refused", fault("refused")),
        ("reconciled", seen("reconciled")),
        ("probes", seen("probes")),
    ];
    let line: Vec<String> = faults
        .iter()
        .map(|(name, n)| format!("{name}={n}"))
        .collect();
    println!("demo-faults: {}", line.join(" "));
    println!(
        "demo: orders={total} effects={effects} lost={lost} doubled={doubled} unknown_left={unknown_left}"
    );
    if let Some((name, _)) = faults.iter().find(|(_, n)| *n == 0) {
        return Err(format!("the fault {name} did not happen").into());
    }
    if effects != total || lost + doubled + changed > 0 || unknown_left > 0 {
        return Err("the promise is broken".into());
    }
    Ok(())
}
