//! The story: starts the processes, kills a dispatcher in the middle, waits for
//! the last row, and has the outcome checked.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use diesel::prelude::*;
use diesel_outbox::schema::tf_outbox;
use indicatif::{ProgressBar, ProgressStyle};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::database::Database;
use crate::{Outcome, orders};

const LIMIT: Duration = Duration::from_secs(120);
const STARTED: Duration = Duration::from_secs(20);

/// One process of the story. Dropping it ends it.
struct Process {
    child: Child,
    /// Held open: the child ends when it closes.
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    /// What it last said of itself.
    stats: Arc<Mutex<HashMap<String, u64>>>,
}

impl Process {
    fn start(arguments: &[&str]) -> Outcome<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("role")
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().ok_or("no output")?;
        let (said, lines) = channel();
        let stats: Arc<Mutex<HashMap<String, u64>>> = Arc::default();
        let latest = Arc::clone(&stats);
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if let Some(json) = line.strip_prefix("stats ") {
                    if let Ok(read) = serde_json::from_str(json) {
                        *latest.lock().unwrap_or_else(PoisonError::into_inner) = read;
                    }
                } else if said.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self {
            child,
            stdin,
            lines,
            stats,
        })
    }

    /// The rest of the line that begins with `word`.
    fn said(&self, word: &str) -> Outcome<String> {
        loop {
            let line = self
                .lines
                .recv_timeout(STARTED)
                .map_err(|_| format!("a process did not say its {word}"))?;
            if let Some(rest) = line.strip_prefix(word) {
                return Ok(rest.trim().to_owned());
            }
        }
    }

    fn address(&self) -> Outcome<String> {
        Ok(format!("http://127.0.0.1:{}", self.said("port")?))
    }

    fn signal(&self, signal: Signal) -> Outcome {
        Ok(kill_process(Pid::from_child(&self.child), signal)?)
    }

    fn ended(&mut self) -> Outcome<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Asks it to end, and sees that it does.
    fn end(&mut self) {
        self.stdin = None;
        let until = Instant::now() + Duration::from_secs(6);
        while Instant::now() < until {
            if let Ok(Some(_)) = self.child.try_wait() {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}

/// The standing parts: database, provider, service, dispatchers.
struct Stage {
    // Dropped in this order: whoever uses the database goes before it.
    dispatchers: Vec<Process>,
    service: Process,
    receiver: Process,
    service_url: String,
    receiver_url: String,
    ledger: PathBuf,
    directory: tempfile::TempDir,
    database: Database,
}

impl Stage {
    fn set() -> Outcome<Self> {
        let database = Database::create()?;
        let directory = tempfile::tempdir()?;
        let ledger = directory.path().join("ledger.jsonl");
        println!("Starting the payment provider, the order service and two dispatchers …");
        let receiver = Process::start(&["receiver", text(&ledger)?])?;
        let receiver_url = receiver.address()?;
        let service = Process::start(&["service", &database.url])?;
        let service_url = service.address()?;
        let mut stage = Self {
            dispatchers: Vec::new(),
            service,
            receiver,
            service_url,
            receiver_url,
            ledger,
            directory,
            database,
        };
        for _ in 0..2 {
            stage.add_dispatcher()?;
        }
        Ok(stage)
    }

    fn add_dispatcher(&mut self) -> Outcome {
        let arguments = ["dispatcher", &self.database.url, &self.receiver_url];
        self.dispatchers.push(Process::start(&arguments)?);
        Ok(())
    }

    /// Nobody of the cast may end by itself.
    fn check_cast(&mut self) -> Outcome {
        for (name, process) in [
            ("the order service", &mut self.service),
            ("the payment provider", &mut self.receiver),
        ] {
            if process.ended()?.is_some() {
                return Err(format!("{name} ended").into());
            }
        }
        Ok(())
    }
}

fn text(path: &Path) -> Outcome<&str> {
    Ok(path.to_str().ok_or("a path that is not UTF-8")?)
}

/// Set by Ctrl-C.
fn interrupted() -> Outcome<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&flag))?;
    }
    Ok(flag)
}

pub(crate) fn serve() -> Outcome {
    let stop = interrupted()?;
    let mut stage = Stage::set()?;
    println!(
        "The service is running. Try:\n\n  curl -i {}/orders -d '{{\"key\": \"order-1\", \"payload\": {{\"cents\": 4200}}}}'\n\nThe provider's ledger: {}\nCtrl-C ends it.",
        stage.service_url,
        stage.ledger.display()
    );
    while !stop.load(Ordering::Relaxed) {
        stage.check_cast()?;
        thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

pub(crate) fn run(own: Option<&str>) -> Outcome {
    let stop = interrupted()?;
    // Read before anything starts, so that a bad line is said at once.
    let given = own.map(|path| orders::read(Path::new(path))).transpose()?;
    let mut stage = Stage::set()?;
    let path = match own {
        Some(path) => PathBuf::from(path),
        None => {
            let path = stage.directory.path().join("orders.jsonl");
            orders::generate(&path)?;
            path
        }
    };
    let total = match given {
        Some(orders) => orders.len(),
        None => orders::read(&path)?.len(),
    };
    println!("A client posts {total} orders; half-way one dispatcher is killed with SIGKILL.");
    let client = Process::start(&["client", &stage.service_url, text(&path)?])?;
    let killed = play(&mut stage, client, total, &stop)?;

    let mut seen: HashMap<String, u64> = HashMap::from([("killed".to_owned(), 1)]);
    for process in stage.dispatchers.iter().chain([&killed]) {
        let stats = process.stats.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, n) in stats.iter() {
            *seen.entry(name.clone()).or_default() += n;
        }
    }
    let seen = serde_json::to_string(&seen)?;
    let mut checker = Command::new(std::env::current_exe()?)
        .args(["role", "check", &stage.database.url])
        .args([text(&stage.ledger)?, text(&path)?, &seen])
        .stdin(Stdio::piped())
        .spawn()?;
    // Held until it has ended: waiting would close it first, and end the checker.
    let _stdin = checker.stdin.take();
    let status = checker.wait()?;
    if status.success() {
        Ok(())
    } else {
        Err("the check failed".into())
    }
}

/// Runs the story to its end; returns the dispatcher that was killed.
fn play(
    stage: &mut Stage,
    mut client: Process,
    total: usize,
    stop: &AtomicBool,
) -> Outcome<Process> {
    let victim = stage.dispatchers[0].said("worker")?;
    let mut conn = stage.database.connect()?;
    let mut progress = Progress::new(total);
    let mut killed: Option<Process> = None;
    let begun = Instant::now();
    loop {
        if stop.load(Ordering::Relaxed) {
            return Err("interrupted".into());
        }
        if begun.elapsed() > LIMIT {
            return Err("the rows were not all settled in time".into());
        }
        stage.check_cast()?;
        if client.ended()?.is_some_and(|status| !status.success()) {
            return Err("the client could not post its orders".into());
        }
        let (rows, settled) = counts(&mut conn)?;
        progress.show(rows, settled);
        if killed.is_none()
            && settled * 5 >= total * 2
            && freeze_in_flight(stage, &mut conn, &victim)?
        {
            let process = stage.dispatchers.remove(0);
            process.signal(Signal::KILL)?;
            stage.add_dispatcher()?;
            killed = Some(process);
            progress.note("a dispatcher was killed with calls in flight, and another started");
        }
        if settled == total
            && let Some(killed) = killed.take()
        {
            progress.end();
            // The dispatchers say what they did ten times a second.
            thread::sleep(Duration::from_millis(300));
            return Ok(killed);
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// All rows, and those that have come to an end.
fn counts(conn: &mut PgConnection) -> Outcome<(usize, usize)> {
    let by_status: Vec<(String, i64)> = tf_outbox::table
        .group_by(tf_outbox::status)
        .select((tf_outbox::status, diesel::dsl::count_star()))
        .load(conn)?;
    let count = |wanted: &[&str]| {
        by_status
            .iter()
            .filter(|(status, _)| wanted.is_empty() || wanted.contains(&status.as_str()))
            .map(|(_, n)| usize::try_from(*n).unwrap_or(0))
            .sum()
    };
    Ok((count(&[]), count(&["completed", "failed"])))
}

/// Stops the first dispatcher where it is. If it holds rows there it stays
/// stopped; if not, it goes on and another moment is tried.
fn freeze_in_flight(stage: &Stage, conn: &mut PgConnection, victim: &str) -> Outcome<bool> {
    let process = &stage.dispatchers[0];
    process.signal(Signal::STOP)?;
    let held: i64 = tf_outbox::table
        .filter(tf_outbox::claim_worker_id.eq(victim))
        .count()
        .get_result(conn)?;
    if held == 0 {
        process.signal(Signal::CONT)?;
    }
    Ok(held > 0)
}

/// A bar on a terminal, a line a second elsewhere.
struct Progress {
    total: usize,
    bar: Option<ProgressBar>,
    said: Instant,
}

impl Progress {
    fn new(total: usize) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(total as u64);
            if let Ok(style) = ProgressStyle::with_template("{bar:40} {pos}/{len} settled {msg}") {
                bar.set_style(style);
            }
            bar
        });
        Self {
            total,
            bar,
            said: Instant::now(),
        }
    }

    fn show(&mut self, rows: usize, settled: usize) {
        if let Some(bar) = &self.bar {
            bar.set_position(settled as u64);
        } else if self.said.elapsed() >= Duration::from_secs(1) {
            self.said = Instant::now();
            println!("  {rows} of {} ordered, {settled} settled", self.total);
        }
    }

    fn note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(format!("  {text}")),
            None => println!("  {text}"),
        }
    }

    fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
