//! Real processes: this test binary again, in a role, to be frozen and killed.
//!
//! A role is an ordinary `#[test]` whose body stands in [`role`]. Run as a test it
//! does nothing and passes; [`Child::spawn`] runs the binary again for that one
//! test, with the environment variable that makes the body run.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::wait::{eventually, stretched};

const ROLE: &str = "OUTBOX_TEST_ROLE";

/// What the harness prints may share a line with what the role says.
const MARK: &str = "@@ ";

/// Runs `body` if this process was spawned for the role `name`, which is the
/// test's own name.
pub fn role(name: &str, body: impl FnOnce()) {
    if std::env::var(ROLE).is_ok_and(|role| role == name) {
        body();
    }
}

/// Tells the process that spawned this one; see [`Child::wait_line`].
pub fn say(line: &str) {
    // Straight to the descriptor: the harness captures only `println!`.
    let mut out = std::io::stdout().lock();
    let told = writeln!(out, "{MARK}{line}").and_then(|()| out.flush());
    // The parent may have gone, and a role outlives it on purpose at times.
    drop(told);
}

/// A process of ours; killed when it is dropped.
#[derive(Debug)]
pub struct Child {
    name: String,
    process: std::process::Child,
    lines: Receiver<String>,
}

impl Child {
    /// This test binary again, in a role.
    pub fn spawn(name: &str, environment: &[(&str, &str)]) -> Self {
        let this = std::env::current_exe().expect("the test binary's own path");
        let mut command = Command::new(this);
        command
            .args(["--exact", name, "--nocapture"])
            .env(ROLE, name)
            .envs(environment.iter().copied())
            .stdin(Stdio::null());
        Self::run(name, command)
    }

    /// An example of this package, which `cargo test` has built.
    pub fn spawn_example(name: &str, arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        let this = std::env::current_exe().expect("the test binary's own path");
        let profile = this
            .ancestors()
            .nth(2)
            .expect("a test binary lies in target/<profile>/deps");
        let mut command = Command::new(profile.join("examples").join(name));
        // Some end when their standard input does.
        command
            .args(arguments)
            .envs(environment.iter().copied())
            .stdin(Stdio::piped());
        Self::run(name, command)
    }

    fn run(name: &str, mut command: Command) -> Self {
        let mut process = command
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("spawning {name}: {error}"));
        let stdout = process.stdout.take().expect("stdout is a pipe");
        let (sender, lines) = mpsc::channel();
        // Read always, so that a talkative child never blocks on a full pipe.
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let line = line
                    .split_once(MARK)
                    .map_or(line.as_str(), |(_, said)| said);
                if sender.send(line.to_owned()).is_err() {
                    break;
                }
            }
        });
        Self {
            name: name.to_owned(),
            process,
            lines,
        }
    }

    /// The process id.
    pub fn pid(&self) -> i32 {
        self.process.id().cast_signed()
    }

    /// The rest of the next line that begins with `prefix`; lines before it are
    /// passed over.
    pub fn wait_line(&self, prefix: &str, deadline: Duration) -> String {
        let end = Instant::now() + stretched(deadline);
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    if let Some(rest) = line.strip_prefix(prefix) {
                        return rest.trim().to_owned();
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    panic!("{} did not say `{prefix}` within {deadline:?}", self.name)
                }
                Err(RecvTimeoutError::Disconnected) => {
                    panic!("{} ended and never said `{prefix}`", self.name)
                }
            }
        }
    }

    /// Waits for the end of the process.
    pub fn wait_exit(&mut self, deadline: Duration) -> ExitStatus {
        let Self { name, process, .. } = self;
        eventually(deadline, &format!("the end of {name}"), || {
            process.try_wait().expect("the child is ours")
        })
    }

    /// Freezes the process.
    pub fn sigstop(&self) {
        self.signal(Signal::STOP);
    }

    /// Lets a frozen process go on.
    pub fn sigcont(&self) {
        self.signal(Signal::CONT);
    }

    /// Asks the process to end.
    pub fn sigterm(&self) {
        self.signal(Signal::TERM);
    }

    /// Ends the process at once, as `kill -9` does, and waits until it has.
    pub fn sigkill(&mut self) {
        self.process.kill().expect("the child is ours");
        self.process.wait().expect("the child is ours");
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid()).expect("a process id is positive");
        kill_process(pid, signal)
            .unwrap_or_else(|error| panic!("signalling {}: {error}", self.name));
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
