//! A PgBouncer in transaction mode in front of a private server, where one can be
//! had.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::server::Server;
use super::wait::eventually;

/// Gives each transaction of its clients one of few server connections; ended when
/// it is dropped.
#[derive(Debug)]
pub struct PgBouncer {
    process: Child,
    port: u16,
}

impl PgBouncer {
    /// With `connections` to the server for all clients together. `None`, and it is
    /// said why, where no PgBouncer can be had.
    pub fn before(server: &Server, connections: usize) -> Option<Self> {
        let program = find()?;
        let dir = server.dir().join("pgbouncer");
        fs::create_dir_all(&dir).unwrap();
        let program = copied(server, &program, &dir);
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let settings = dir.join("pgbouncer.ini");
        fs::write(
            &settings,
            format!(
                "[databases]\n\
                 * = host={} port={} user=outbox\n\
                 [pgbouncer]\n\
                 listen_addr = 127.0.0.1\n\
                 listen_port = {port}\n\
                 unix_socket_dir =\n\
                 auth_type = any\n\
                 pool_mode = transaction\n\
                 max_client_conn = 100\n\
                 default_pool_size = {connections}\n",
                server.dir().display(),
                server.port(),
            ),
        )
        .unwrap();
        server.give_to_server(&settings).unwrap();
        let process = server
            .command(&program)
            .env("LD_LIBRARY_PATH", &dir)
            .arg("-q")
            .arg(&settings)
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let this = Self { process, port };
        eventually(Duration::from_secs(10), "a pooler that listens", || {
            TcpStream::connect(("127.0.0.1", port)).ok()
        });
        Some(this)
    }

    /// The URL of a database through it.
    pub fn url(&self, database: &str) -> String {
        format!("postgres://outbox@127.0.0.1:{}/{database}", self.port)
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn find() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let script = root.join("scripts/pgbouncer");
    let found = Command::new(&script).output().ok()?;
    if !found.status.success() {
        let why = String::from_utf8_lossy(&found.stderr);
        println!("skipped, for want of a PgBouncer: {}", why.trim());
        return None;
    }
    let path = String::from_utf8(found.stdout).unwrap();
    Some(root.join(path.trim()))
}

/// The server's user may not be able to enter the folder that it was unpacked in,
/// nor know the libraries beside it.
fn copied(server: &Server, program: &Path, dir: &Path) -> PathBuf {
    let libraries = program
        .ancestors()
        .nth(3)
        .filter(|root| root.ends_with("pgbouncer"))
        .and_then(|root| fs::read_dir(root.join("usr/lib")).ok())
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| fs::read_dir(entry.path()).ok())
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.is_file());
    for file in libraries.chain([program.to_owned()]) {
        let copy = dir.join(file.file_name().unwrap());
        fs::copy(&file, &copy).unwrap();
        server.give_to_server(&copy).unwrap();
    }
    server.give_to_server(dir).unwrap();
    dir.join(program.file_name().unwrap())
}
