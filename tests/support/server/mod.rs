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
mod signals;

use std::fs;
use std::io::{self, Write};
use std::net::TcpListener;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use babysitter::Babysitter;
use binaries::ServerUser;

/// Losing the machine may lose the data; losing a process may not, so that tests
/// which kill the server still prove something.
const FAST: &[(&str, &str)] = &[("fsync", "off"), ("full_page_writes", "off")];

const ALWAYS: &[(&str, &str)] = &[
    ("max_connections", "200"),
    ("lc_messages", "C"),
    ("timezone", "UTC"),
    ("log_line_prefix", "%m [%p] %a: "),
    ("jit", "off"),
];

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

/// What is settled before the server first starts.
#[derive(Debug, Default)]
pub struct Builder {
    settings: Vec<(String, String)>,
    durable: bool,
}

impl Builder {
    /// Adds a line to `postgresql.conf`; a later one wins.
    #[must_use]
    pub fn setting(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.into(), value.into()));
        self
    }

    /// Keeps `fsync` on, for measurements.
    #[must_use]
    pub fn durable(mut self) -> Self {
        self.durable = true;
        self
    }

    /// Starts the server; a test cannot go on without it, so this panics.
    pub fn start(self) -> Server {
        self.launch()
            .unwrap_or_else(|error| panic!("private server: {error}"))
    }

    /// Starts the server, or says why not in a sentence for a person.
    pub fn launch(self) -> io::Result<Server> {
        let bin = binaries::find()?;
        let user = binaries::server_user()?;
        let dir = temporary_directory(user.as_ref())?;
        let mut server = Server {
            babysitter: Babysitter::watch(&dir)?,
            password: uuid::Uuid::new_v4().simple().to_string(),
            port: 0,
            dir,
            bin,
            user,
        };
        server.initdb()?;
        let fast = if self.durable { &[] } else { FAST };
        for (name, value) in ALWAYS.iter().chain(fast) {
            server.write_setting(name, value)?;
        }
        let socket_dir = server.dir.display().to_string();
        server.write_setting("unix_socket_directories", &socket_dir)?;
        server.write_setting("listen_addresses", "127.0.0.1")?;
        for (name, value) in &self.settings {
            server.write_setting(name, value)?;
        }
        server.start_on_a_free_port()?;
        Ok(server)
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

    fn signal_all(&self, signal: rustix::process::Signal) {
        let pid = self.pid().unwrap_or_else(|| panic!("no server runs"));
        signals::signal_tree(pid, signal)
            .unwrap_or_else(|error| panic!("signalling the private server: {error}"));
    }

    fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    fn initdb(&self) -> io::Result<()> {
        let password_file = self.dir.join("password");
        fs::write(&password_file, &self.password)?;
        self.give_to_server(&password_file)?;
        // Not every system knows C.UTF-8, and an unset LANG would make SQL_ASCII.
        let made = self.initdb_with("C.UTF-8").or_else(|first| {
            let _ = fs::remove_dir_all(self.data());
            self.initdb_with("C")
                .map_err(|second| io::Error::other(format!("{first}\n{second}")))
        });
        fs::remove_file(&password_file)?;
        made
    }

    fn initdb_with(&self, locale: &str) -> io::Result<()> {
        let mut initdb = self.program("initdb");
        initdb
            .arg("--pgdata")
            .arg(self.data())
            .arg("--pwfile")
            .arg(self.dir.join("password"))
            .args(["--username=outbox", "--encoding=UTF8", "--no-sync"])
            .args(["--auth-local=trust", "--auth-host=scram-sha-256"])
            .arg(format!("--locale={locale}"));
        run(initdb)
    }

    /// Another process may take the port between the look and the start, so a
    /// failure is tried again on another one.
    fn start_on_a_free_port(&mut self) -> io::Result<()> {
        let mut tries = 0;
        loop {
            self.port = free_port()?;
            self.write_setting("port", &self.port.to_string())?;
            tries += 1;
            match self.pg_ctl_start() {
                Ok(()) => return Ok(()),
                Err(_) if tries < 5 && self.log().contains("Address already in use") => {}
                Err(error) => return Err(error),
            }
        }
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
        let path = self.bin.join(name);
        let mut command = match &self.user {
            Some(user) => user.command(&path),
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

    fn give_to_server(&self, path: &Path) -> io::Result<()> {
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

/// The socket's path must stay under 104 bytes, and another user must be able to
/// reach it.
fn temporary_directory(user: Option<&ServerUser>) -> io::Result<PathBuf> {
    let wanted = std::env::temp_dir();
    let base = if user.is_some() || wanted.as_os_str().len() > 60 {
        Path::new("/tmp")
    } else {
        &wanted
    };
    let dir = tempfile::Builder::new()
        .prefix("outbox-pg-")
        .tempdir_in(base)?
        .keep();
    if let Some(user) = user {
        chown(&dir, Some(user.uid), Some(user.gid))?;
    }
    Ok(dir)
}

fn free_port() -> io::Result<u16> {
    loop {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        // Reserved for a server of the machine's, even where none runs now.
        if port != 5432 {
            return Ok(port);
        }
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
