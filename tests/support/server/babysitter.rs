//! Ends the server when this process ends, however it ends.
//!
//! A shell holds the read end of a pipe whose only write end is ours, close on
//! exec. The kernel closes it even after SIGKILL, and the shell then stops the
//! server and removes its directory. It is in a process group of its own and
//! ignores what a terminal sends.

use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// The process id is trusted only while its command line names the data directory,
/// where `/proc` can tell: numbers are used again, and a zombie has none. (Its
/// working directory would tell too, but not root in a container.) SIGCONT is for
/// a server that a test froze. `initdb` may still be writing, hence the second
/// loop.
const SCRIPT: &str = r#"
trap '' HUP INT QUIT TERM
while read -r _; do :; done

dir=$1
data=$dir/data

runs() {
    read -r pid 2>/dev/null <"$data/postmaster.pid" || return 1
    kill -0 "$pid" 2>/dev/null || return 1
    [ ! -e /proc/self/cmdline ] || grep -qF -- "$data" "/proc/$pid/cmdline"
}

signal=QUIT
tries=0
while runs; do
    [ $tries -lt 200 ] || signal=KILL
    kill -$signal "$pid" && kill -CONT "$pid"
    sleep 0.05
    tries=$((tries + 1))
done

tries=0
while [ -e "$dir" ] && [ $tries -lt 100 ]; do
    rm -rf "$dir" 2>/dev/null || sleep 0.1
    tries=$((tries + 1))
done
"#;

/// The shell, and the write end of its pipe.
#[derive(Debug)]
pub struct Babysitter(Child);

impl Babysitter {
    /// Watches over the server in `dir`, from before it exists.
    pub fn watch(dir: &Path) -> io::Result<Self> {
        Command::new("/bin/sh")
            .args(["-c", SCRIPT, "outbox-babysitter"])
            .arg(dir)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .map(Self)
    }

    /// Has the server stopped and its directory removed, and waits for that.
    pub fn end(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}
