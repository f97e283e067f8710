//! The client: posts each order once, over a few connections at a time.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use serde_json::json;

use crate::{Outcome, end_with_parent, orders};

const THREADS: usize = 8;

pub(crate) fn run(service: &str, path: &str) -> Outcome {
    end_with_parent(|| {});
    let orders = orders::read(Path::new(path))?;
    let next = AtomicUsize::new(0);
    let refused = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                loop {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    let Some(order) = orders.get(n) else {
                        return;
                    };
                    let body = json!({ "key": orders::key(n), "payload": order }).to_string();
                    let answer = minreq::post(format!("{service}/orders"))
                        .with_header("content-type", "application/json")
                        .with_body(body)
                        .with_timeout(10)
                        .send();
                    match answer {
                        Ok(response) if response.status_code == 201 => {}
                        Ok(response) => {
                            eprintln!("order {n}: {}", response.status_code);
                            refused.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(error) => {
                            eprintln!("order {n}: {error}");
                            refused.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
    });
    match refused.into_inner() {
        0 => Ok(()),
        n => Err(format!("{n} orders were not taken").into()),
    }
}
