//! How a server is made: found, initialised, configured and first started.

use std::fs;
use std::io;
use std::net::TcpListener;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};

use super::babysitter::Babysitter;
use super::binaries::{self, ServerUser};
use super::{Server, run};

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

impl Server {
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
