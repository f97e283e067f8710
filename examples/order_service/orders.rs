//! The orders that are posted: generated, or a person's own.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::Outcome;

/// How many are generated.
const GENERATED: usize = 2_000;

/// One payload an order, from a file of JSON lines.
pub(crate) fn read(path: &Path) -> Outcome<Vec<Value>> {
    let text = fs::read_to_string(path)
        .map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    let mut orders = Vec::new();
    for (number, line) in text.lines().enumerate() {
        if line.trim().is_empty() {
            continue;
        }
        match serde_json::from_str(line) {
            Ok(order @ Value::Object(_)) => orders.push(order),
            Ok(_) => return Err(format!("line {}: not a JSON object", number + 1).into()),
            Err(error) => return Err(format!("line {}: {error}", number + 1).into()),
        }
    }
    if orders.is_empty() {
        return Err("there is no order in the file".into());
    }
    Ok(orders)
}

/// Writes generated orders to a file.
pub(crate) fn generate(path: &Path) -> Outcome {
    let lines: Vec<String> = (0..GENERATED)
        .map(|n| {
            json!({
                "customer": format!("customer-{}", n % 97),
                "cents": 100 + (n * 37) % 9_900,
                "items": [{ "sku": format!("sku-{}", n % 311), "count": 1 + n % 4 }],
            })
            .to_string()
        })
        .collect();
    fs::write(path, lines.join("\n"))?;
    Ok(())
}

/// The key under which order `n` is charged.
pub(crate) fn key(n: usize) -> String {
    format!("order-{n}")
}
