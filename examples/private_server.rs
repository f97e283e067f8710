//! Runs a command with `DATABASE_URL` set to a PostgreSQL server of its own,
//! which ends with the command:
//!
//! ```sh
//! cargo run --example private_server -- cargo test
//! ```
//!
//! Where `DATABASE_URL` is set already, the command runs on that server, and what
//! tests have left there is dropped when it has ended.

#[path = "../tests/support/server/mod.rs"]
mod server;

use std::env;
use std::error::Error;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitCode, ExitStatus};
use std::time::{SystemTime, UNIX_EPOCH};

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::sql_query;
use diesel::sql_types::Text;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

fn main() -> ExitCode {
    let mut arguments = env::args_os().skip(1);
    let Some(program) = arguments.next() else {
        eprintln!("usage: private_server COMMAND [ARGUMENT…]");
        return ExitCode::from(2);
    };
    let mut command = Command::new(program);
    command.args(arguments);
    match run(command) {
        Ok(status) => ExitCode::from(shell_code(status)),
        Err(error) => {
            eprintln!("private_server: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(mut command: Command) -> Result<ExitStatus, Box<dyn Error>> {
    // Taken before there is anything to clean up. A terminal sends SIGINT to the
    // command as well, so that one is only survived.
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM])?;
    let place = Place::find()?;
    match &place {
        Place::Private(server) => command.env("DATABASE_URL", server.url("postgres")),
        Place::Given { run, .. } => command.env("OUTBOX_TEST_RUN", run),
    };
    let mut child = command.spawn()?;
    let child_pid = Pid::from_child(&child);
    std::thread::spawn(move || {
        for signal in signals.forever().filter(|signal| *signal != SIGINT) {
            let signal = if signal == SIGHUP {
                Signal::HUP
            } else {
                Signal::TERM
            };
            // It may have ended in this very moment.
            let _ = kill_process(child_pid, signal);
        }
    });
    let status = child.wait()?;
    place.clean_up()?;
    Ok(status)
}

/// Where the command's databases are made.
enum Place {
    Private(server::Server),
    /// Their names begin with the run's.
    Given {
        url: String,
        run: String,
    },
}

impl Place {
    fn find() -> Result<Self, Box<dyn Error>> {
        let given = env::var("DATABASE_URL").unwrap_or_default();
        if given.is_empty() {
            // Many tests at once, each with a few connections.
            let server = server::Server::builder().setting("max_connections", "500");
            return Ok(Self::Private(server.launch()?));
        }
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
        let run = format!("{seconds}_{:08x}", std::process::id());
        Ok(Self::Given { url: given, run })
    }

    fn clean_up(self) -> Result<(), Box<dyn Error>> {
        let Self::Given { url, run } = self else {
            return Ok(());
        };
        let mut conn = PgConnection::establish(&url)?;
        let names = sql_query("SELECT datname::text AS name FROM pg_database WHERE datname ^@ $1")
            .bind::<Text, _>(format!("outbox_test_{run}_"))
            .load::<Database>(&mut conn)?;
        for Database { name } in names {
            // A test's own end may be dropping it in this moment.
            conn.batch_execute(&format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)"))?;
        }
        Ok(())
    }
}

#[derive(QueryableByName)]
struct Database {
    #[diesel(sql_type = Text)]
    name: String,
}

/// As a shell reports it: 128 and the signal's number for a killed command.
fn shell_code(status: ExitStatus) -> u8 {
    let code = status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    u8::try_from(code).unwrap_or(1)
}
