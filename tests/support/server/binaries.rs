//! Where the server's programs are, and who may run them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

const NEEDED: [&str; 3] = ["initdb", "pg_ctl", "postgres"];

/// Where packages put them: Debian, Red Hat, Homebrew on both kinds of Mac.
const PLACES: [(&str, &str, &str); 4] = [
    ("/usr/lib/postgresql", "", "bin"),
    ("/usr", "pgsql-", "bin"),
    ("/opt/homebrew/opt", "postgresql", "bin"),
    ("/usr/local/opt", "postgresql", "bin"),
];

/// The directory that holds `initdb`, `pg_ctl` and `postgres`.
///
/// `PG_BIN` overrides; otherwise the newest version that a package installed,
/// then what `pg_config` and `PATH` say.
pub fn find() -> io::Result<PathBuf> {
    if let Some(chosen) = std::env::var_os("PG_BIN") {
        let chosen = PathBuf::from(chosen);
        return if is_complete(&chosen) {
            Ok(chosen)
        } else {
            Err(io::Error::other(format!(
                "PG_BIN={} does not hold {NEEDED:?}",
                chosen.display()
            )))
        };
    }
    let mut packaged: Vec<_> = PLACES.iter().flat_map(installed).collect();
    packaged.sort_by_key(|(version, _)| std::cmp::Reverse(*version));
    packaged
        .into_iter()
        .map(|(_, dir)| dir)
        .chain(pg_config())
        .chain(
            std::env::var_os("PATH")
                .iter()
                .flat_map(std::env::split_paths),
        )
        .find(|dir| is_complete(dir))
        .ok_or_else(|| {
            io::Error::other(
                "no PostgreSQL server programs found: install PostgreSQL, or set PG_BIN to the \
                 directory that holds initdb, or DATABASE_URL to a server that runs",
            )
        })
}

fn is_complete(dir: &Path) -> bool {
    NEEDED.iter().all(|program| dir.join(program).is_file())
}

/// The versions in one place; an unversioned folder counts as the oldest.
fn installed((parent, prefix, bin): &(&str, &str, &str)) -> Vec<(u32, PathBuf)> {
    let Ok(entries) = fs::read_dir(parent) else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let version = name.strip_prefix(prefix)?.trim_start_matches('@');
            let version = version.parse().unwrap_or(0);
            Some((version, entry.path().join(bin)))
        })
        .collect()
}

fn pg_config() -> Option<PathBuf> {
    let output = Command::new("pg_config").arg("--bindir").output().ok()?;
    let dir = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| PathBuf::from(dir.trim()))
}

/// Whom root runs the server as; PostgreSQL refuses root itself.
#[derive(Debug)]
pub struct ServerUser {
    pub uid: u32,
    pub gid: u32,
}

impl ServerUser {
    /// `program`, run as this user.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("setpriv");
        command
            .arg(format!("--reuid={}", self.uid))
            .arg(format!("--regid={}", self.gid))
            .args(["--clear-groups", "--"])
            .arg(program);
        command
    }
}

/// `None` when this process may run the server itself.
pub fn server_user() -> io::Result<Option<ServerUser>> {
    if !rustix::process::geteuid().is_root() {
        return Ok(None);
    }
    let passwd = fs::read_to_string("/etc/passwd")?;
    let user = ["postgres", "nobody"]
        .iter()
        .find_map(|name| passwd.lines().find_map(|line| parse(line, name)));
    user.map(Some).ok_or_else(|| {
        io::Error::other("PostgreSQL refuses to run as root, and there is neither a user `postgres` nor `nobody`")
    })
}

/// One line of passwd: name, password, uid, gid and what follows.
fn parse(line: &str, name: &str) -> Option<ServerUser> {
    let mut fields = line.split(':');
    if fields.next() != Some(name) {
        return None;
    }
    Some(ServerUser {
        uid: fields.nth(1)?.parse().ok()?,
        gid: fields.next()?.parse().ok()?,
    })
}
