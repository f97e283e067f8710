//! A TCP proxy in front of the server, for the faults of a network.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::thread;

/// The port that a URL leads to.
pub fn port_of(url: &str) -> u16 {
    let (_, address) = url.rsplit_once('@').unwrap();
    let address = address.split('/').next().unwrap();
    let port = address.rsplit_once(':').map_or("5432", |(_, port)| port);
    port.parse().unwrap()
}

/// What the proxy does with what it receives.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Fault {
    #[default]
    None,
    Refuse,
    Blackhole,
    /// The end of the connection whose request held this, in place of the answer.
    EndAnswerTo(Vec<u8>, End),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Cut,
    Silence,
}

/// Listens on 127.0.0.1 and passes everything on, until it is told otherwise.
///
/// Its connections are cut when it is dropped.
#[derive(Debug)]
pub struct Proxy {
    state: Arc<State>,
    port: u16,
    target: u16,
}

impl Proxy {
    /// In front of a port on 127.0.0.1.
    pub fn to(target: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(State::default());
        let accepting = Arc::clone(&state);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if accepting.closed.load(Ordering::SeqCst) {
                    return;
                }
                accept(client, target, &accepting);
            }
        });
        Self {
            state,
            port,
            target,
        }
    }

    /// The same database, through this proxy.
    pub fn url(&self, direct: &str) -> String {
        let (ours, theirs) = (format!(":{}/", self.port), format!(":{}/", self.target));
        assert!(
            direct.contains(&theirs),
            "not a URL of the server behind this proxy"
        );
        direct.replacen(&theirs, &ours, 1)
    }

    /// Ends every connection and says how many there were; new ones work.
    pub fn cut(&self) -> usize {
        self.state.cut()
    }

    /// Ends every connection, and each new one at once, until [`Self::heal`].
    pub fn refuse(&self) {
        *self.state.fault() = Fault::Refuse;
        self.state.cut();
    }

    /// Swallows what either side sends until [`Self::heal`]; connections stay
    /// open. What was swallowed is lost, so a connection that sent meanwhile is of
    /// no use afterwards.
    pub fn blackhole(&self) {
        *self.state.fault() = Fault::Blackhole;
    }

    /// Passes the next message that holds `needle` on to the server, waits for the
    /// answer and cuts the connection in its place, once: the server has done what
    /// the client will never know. `COMMIT` is the usual needle.
    pub fn cut_answer_to(&self, needle: &str) {
        *self.state.fault() = Fault::EndAnswerTo(needle.as_bytes().to_vec(), End::Cut);
    }

    /// The same, but nothing is cut: from that answer on the client of this
    /// connection hears nothing more.
    pub fn silence_answer_to(&self, needle: &str) {
        *self.state.fault() = Fault::EndAnswerTo(needle.as_bytes().to_vec(), End::Silence);
    }

    /// Passes everything on again.
    pub fn heal(&self) {
        *self.state.fault() = Fault::None;
    }

    /// How many statements passed so far, transactions' own included.
    pub fn statements(&self) -> usize {
        self.state.statements.load(Ordering::SeqCst)
    }

    /// How often a fault met somebody: connections refused, pieces swallowed,
    /// answers cut. For a test to show that its fault really happened.
    pub fn fired(&self) -> usize {
        self.state.fired.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.state.closed.store(true, Ordering::SeqCst);
        self.state.cut();
        // Wakes the accepting thread, which then sees that it is over.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

#[derive(Debug, Default)]
struct State {
    fault: Mutex<Fault>,
    fired: AtomicUsize,
    statements: AtomicUsize,
    closed: AtomicBool,
    connections: Mutex<Vec<Weak<Connection>>>,
}

impl State {
    fn fault(&self) -> MutexGuard<'_, Fault> {
        self.fault.lock().unwrap()
    }

    fn fire(&self) {
        self.fired.fetch_add(1, Ordering::SeqCst);
    }

    fn cut(&self) -> usize {
        let mut connections = self.connections.lock().unwrap();
        let open = connections.drain(..).filter_map(|weak| weak.upgrade());
        open.map(|connection| connection.cut()).count()
    }

    fn remember(&self, connection: &Arc<Connection>) {
        let mut connections = self.connections.lock().unwrap();
        connections.retain(|weak| weak.strong_count() > 0);
        connections.push(Arc::downgrade(connection));
    }
}

#[derive(Debug)]
struct Connection {
    client: TcpStream,
    server: TcpStream,
    /// How the server's next answer ends it.
    doomed: Mutex<Option<End>>,
}

impl Connection {
    fn cut(&self) {
        let _ = self.client.shutdown(Shutdown::Both);
        let _ = self.server.shutdown(Shutdown::Both);
    }
}

fn accept(client: TcpStream, target: u16, state: &Arc<State>) {
    if *state.fault() == Fault::Refuse {
        state.fire();
        return;
    }
    // A stopped server refuses, and so does the proxy by dropping the client.
    let Ok(server) = TcpStream::connect(("127.0.0.1", target)) else {
        return;
    };
    let _ = client.set_nodelay(true);
    let _ = server.set_nodelay(true);
    let connection = Arc::new(Connection {
        client,
        server,
        doomed: Mutex::new(None),
    });
    state.remember(&connection);
    for direction in [pass_requests, pass_answers] {
        let (connection, state) = (Arc::clone(&connection), Arc::clone(state));
        thread::spawn(move || {
            if direction(&connection, &state).is_err() {
                connection.cut();
            }
        });
    }
}

fn pass_requests(connection: &Connection, state: &State) -> io::Result<()> {
    let mut recent = Vec::new();
    let mut messages = Messages::default();
    pass(&connection.client, &connection.server, |piece| {
        let statements = messages.statements_in(piece);
        state.statements.fetch_add(statements, Ordering::SeqCst);
        let mut fault = state.fault();
        match &*fault {
            Fault::Blackhole => {
                state.fire();
                Ok(false)
            }
            Fault::EndAnswerTo(needle, end) => {
                // A message may arrive in two pieces.
                recent.extend_from_slice(piece);
                if contains(&recent, needle) {
                    *connection.doomed.lock().unwrap() = Some(*end);
                    *fault = Fault::None;
                } else {
                    let keep = recent.len().min(needle.len());
                    recent.drain(..recent.len() - keep);
                }
                Ok(true)
            }
            Fault::None | Fault::Refuse => Ok(true),
        }
    })
}

fn pass_answers(connection: &Connection, state: &State) -> io::Result<()> {
    pass(&connection.server, &connection.client, |_| {
        match *connection.doomed.lock().unwrap() {
            Some(End::Cut) => {
                state.fire();
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            Some(End::Silence) => {
                state.fire();
                return Ok(false);
            }
            None => {}
        }
        let swallow = *state.fault() == Fault::Blackhole;
        if swallow {
            state.fire();
        }
        Ok(!swallow)
    })
}

/// Copies until the end, piece by piece; `passes` says which go on.
fn pass(
    mut from: &TcpStream,
    mut to: &TcpStream,
    mut passes: impl FnMut(&[u8]) -> io::Result<bool>,
) -> io::Result<()> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let read = from.read(&mut buffer)?;
        if read == 0 {
            return to.shutdown(Shutdown::Write);
        }
        if passes(&buffer[..read])? {
            to.write_all(&buffer[..read])?;
        }
    }
}

/// Reads the frontend's messages (PostgreSQL's documentation, "Message Formats")
/// as far as it takes to count statements.
#[derive(Debug, Default)]
struct Messages {
    started: bool,
    unread: Vec<u8>,
}

impl Messages {
    fn statements_in(&mut self, piece: &[u8]) -> usize {
        self.unread.extend_from_slice(piece);
        let mut count = 0;
        loop {
            // What opens a connection has no type.
            let head = usize::from(self.started);
            let Some(length) = self.unread.get(head..head + 4) else {
                return count;
            };
            let length = u32::from_be_bytes(length.try_into().unwrap()) as usize;
            if self.unread.len() < head + length {
                return count;
            }
            let message: Vec<u8> = self.unread.drain(..head + length).collect();
            match (self.started, message[0]) {
                (true, b'E') => count += 1,
                (true, b'Q') => {
                    let text = String::from_utf8_lossy(&message[5..message.len() - 1]);
                    count += text.split(';').filter(|s| !s.trim().is_empty()).count();
                }
                (true, _) => {}
                // A request for encryption comes before the startup message.
                (false, _) => self.started = length != 8,
            }
        }
    }
}

fn contains(bytes: &[u8], needle: &[u8]) -> bool {
    bytes.windows(needle.len()).any(|window| window == needle)
}
