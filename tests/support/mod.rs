//! What the integration tests stand on: a private server, a database for each
//! test, deadlines instead of sleeps, real processes and real faults.
//!
//! Every test binary compiles this module and uses a part of it.
#![allow(dead_code, unreachable_pub)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

pub mod catalog;
pub mod db;
pub mod dispatch;
pub mod logs;
pub mod pgbouncer;
pub mod process;
pub mod proxy;
pub mod server;
pub mod wait;
