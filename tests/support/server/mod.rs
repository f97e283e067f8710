//! A private PostgreSQL server in a temporary directory.
//!
//! Its TCP port wants a password and its socket lies in a directory of mode
//! 0700: another user of the machine could otherwise run programs as its owner.
//! Whatever becomes of this process, [`babysitter`] stops the server and removes
//! the directory.
//!
//! Examples use this file too, so it depends on no other part of the support.
#![allow(dead_code, unreachable_pub)]

mod babysitter;
mod binaries;
mod builder;
mod signals;

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use babysitter::Babysitter;
use binaries::ServerUser;
pub use builder::Builder;

/// Environment variables that would point PostgreSQL's programs elsewhere.
const FOREIGN_ENVIRONMENT: &[&str] = &[
    "PGDATA",
    "PGHOST",
    "PGPORT",
    "PGUSER",
    "PGDATABASE",
    "PGOPTIONS",
    "LC_ALL",
];

/// How the server ends its sessions when it stops; the words of `pg_ctl`.
#[derive(Clone, Copy, Debug)]
pub enum StopMode {
    /// Waits for every client to go.
    Smart,
    /// Ends every session and shuts down in order.
    Fast,
    /// Ends at once, as by a crash: the next start recovers.
    Immediate,
}

impl StopMode {
    fn as_str(self) -> &'static str {
        match self {
            Self::Smart => "smart",
            Self::Fast => "fast",
            Self::Immediate => "immediate",
        }
    }
}

/// A running server of this process's own.
///
/// Dropping it stops the server and removes its directory.
#[derive(Debug)]
pub struct Server {
    babysitter: Babysitter,
    password: String,
    port: u16,
    dir: PathBuf,
    bin: PathBuf,
    user: Option<ServerUser>,
}

impl Server {
    /// A server with the defaults.
    pub fn start() -> Self {
        Self::builder().start()
    }

    /// A server with settings of the caller's.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// The URL of a database, by TCP.
    pub fn url(&self, database: &str) -> String {
        format!(
            "postgres://outbox:{}@127.0.0.1:{}/{database}",
            self.password, self.port
        )
    }

    /// The URL of a database, by the Unix socket.
    pub fn socket_url(&self, database: &str) -> String {
        let host = self.dir.display().to_string().replace('/', "%2F");
        format!("postgres://outbox@{host}:{}/{database}", self.port)
    }

    /// The TCP port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The directory that goes away with the server.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Stops the server and keeps its data.
    pub fn stop(&self, mode: StopMode) {
        self.pg_ctl(&["stop", "-w", "-m", mode.as_str()])
            .unwrap_or_else(|error| panic!("stopping the private server: {error}"));
    }

    /// Starts a stopped server on the same port.
    pub fn start_again(&self) {
        self.pg_ctl_start()
            .unwrap_or_else(|error| panic!("starting the private server again: {error}"));
    }

    /// Stops and starts.
    pub fn restart(&self, mode: StopMode) {
        self.stop(mode);
        self.start_again();
    }

    /// Appends a setting and returns when new sessions see it; one that exists
    /// already follows when it is idle.
    pub fn reload(&self, name: &str, value: &str) {
        self.write_setting(name, value)
            .unwrap_or_else(|error| panic!("postgresql.conf: {error}"));
        let before = self.log().matches("reloading configuration").count();
        self.pg_ctl(&["reload"])
            .unwrap_or_else(|error| panic!("reloading the private server: {error}"));
        let deadline = Instant::now() + Duration::from_secs(30);
        while self.log().matches("reloading configuration").count() == before {
            assert!(
                Instant::now() < deadline,
                "the server did not read its configuration again"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Restarts as a hot standby that follows nobody: it reads and never writes.
    pub fn become_standby(&self) {
        self.stop(StopMode::Fast);
        let signal = self.data().join("standby.signal");
        fs::write(&signal, "")
            .and_then(|()| self.give_to_server(&signal))
            .unwrap_or_else(|error| panic!("standby.signal: {error}"));
        self.start_again();
    }

    /// Makes a standby a primary again.
    pub fn promote(&self) {
        self.pg_ctl(&["promote", "-w"])
            .unwrap_or_else(|error| panic!("promoting the private server: {error}"));
    }

    /// Everything the server has logged.
    pub fn log(&self) -> String {
        fs::read(self.dir.join("log"))
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    /// The postmaster's process id, while it runs.
    pub fn pid(&self) -> Option<i32> {
        let file = fs::read_to_string(self.data().join("postmaster.pid")).ok()?;
        file.lines().next()?.trim().parse().ok()
    }

    /// Freezes the postmaster and all its sessions: connections stay open and
    /// nobody answers.
    pub fn sigstop(&self) {
        self.signal_all(rustix::process::Signal::STOP);
    }

    /// Lets a frozen server go on.
    pub fn sigcont(&self) {
        self.signal_all(rustix::process::Signal::CONT);
    }

    /// Freezes one session, by its process id.
    pub fn sigstop_session(&self, pid: i32) {
        Self::signal(pid, rustix::process::Signal::STOP);
    }

    /// Lets a frozen session go on.
    pub fn sigcont_session(&self, pid: i32) {
        Self::signal(pid, rustix::process::Signal::CONT);
    }

    fn signal(pid: i32, signal: rustix::process::Signal) {
        signals::signal_tree(pid, signal)
            .unwrap_or_else(|error| panic!("signalling a session: {error}"));
    }

    fn signal_all(&self, signal: rustix::process::Signal) {
        Self::signal(
            self.pid().unwrap_or_else(|| panic!("no server runs")),
            signal,
        );
    }

    fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    fn pg_ctl_start(&self) -> io::Result<()> {
        let log = self.dir.join("log").display().to_string();
        self.pg_ctl(&["start", "-w", "-t", "120", "-l", &log])
            .map_err(|error| io::Error::other(format!("{error}\n{}", self.log())))
    }

    fn pg_ctl(&self, arguments: &[&str]) -> io::Result<()> {
        let mut pg_ctl = self.program("pg_ctl");
        pg_ctl.arg("-D").arg(self.data()).args(arguments);
        run(pg_ctl)
    }

    /// One of the server's programs, as the user who runs the server.
    fn program(&self, name: &str) -> Command {
        self.command(&self.bin.join(name))
    }

    /// A program, as the user who runs the server.
    pub fn command(&self, path: &Path) -> Command {
        let mut command = match &self.user {
            Some(user) => user.command(path),
            None => Command::new(path),
        };
        for variable in FOREIGN_ENVIRONMENT {
            command.env_remove(variable);
        }
        // The caller's directory may be closed to that user.
        command.current_dir(&self.dir).stdin(Stdio::null());
        command
    }

    fn write_setting(&self, name: &str, value: &str) -> io::Result<()> {
        let path = self.data().join("postgresql.conf");
        let mut file = fs::OpenOptions::new().append(true).open(path)?;
        writeln!(file, "{name} = '{}'", value.replace('\'', "''"))
    }

    /// Makes a file of this server's directory its user's own.
    pub fn give_to_server(&self, path: &Path) -> io::Result<()> {
        match &self.user {
            Some(user) => chown(path, Some(user.uid), Some(user.gid)),
            None => Ok(()),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A frozen session would hold up the end for the five seconds after
        // which the postmaster kills it.
        if let Some(pid) = self.pid() {
            let _ = signals::signal_tree(pid, rustix::process::Signal::CONT);
        }
        self.babysitter.end();
    }
}

fn run(mut command: Command) -> io::Result<()> {
    let output = command.output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "{:?} failed ({})\n{}{}",
        command.get_program(),
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )))
}
