//! Signals to the server with all its processes.

use std::fs;
use std::io;

use rustix::process::{Pid, Signal, kill_process};

/// Signals `parent` first, so that it starts nothing more, then its children.
///
/// Every process of the server has a group of its own, so there is no group to
/// signal. Without `/proc` only the parent is reached.
pub fn signal_tree(parent: i32, signal: Signal) -> io::Result<()> {
    send(parent, signal)?;
    for child in children(parent) {
        // It may be gone by now.
        let _ = send(child, signal);
    }
    Ok(())
}

fn send(pid: i32, signal: Signal) -> io::Result<()> {
    let pid = Pid::from_raw(pid).ok_or_else(|| io::Error::other("no such process"))?;
    Ok(kill_process(pid, signal)?)
}

fn children(parent: i32) -> Vec<i32> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid| parent_of(*pid) == Some(parent))
        .collect()
}

/// The fourth field of `stat`; the second, a name in parentheses, may hold spaces.
fn parent_of(pid: i32) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(") ")?;
    rest.split(' ').nth(1)?.parse().ok()
}
