//! Ranks as processes of this test's program, started as `torchrun` starts them, with links that can be cut.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use super::process;

/// The processes of a run. Whatever is left of them ends with it.
pub(crate) struct Processes {
    children: Vec<Child>,
    pub(crate) port: u16,
}

impl Processes {
    /// Starts the test `test` of this binary as each of `world_size` ranks; the environment of each is `set` on top of what
    /// `torchrun` sets, and what it says of an error is in `rank-N.txt` under `dir`. `port_of` may lead a rank elsewhere than
    /// to the port where rank 0 listens.
    pub(crate) fn start(
        test: &str,
        dir: &Path,
        world_size: usize,
        set: &[(&str, String)],
        port_of: impl Fn(usize, u16) -> u16,
    ) -> Self {
        let port = free_port();
        let child = |rank: usize| {
            let mut command = process::child(test);
            command.envs(set.iter().map(|(name, value)| (name, value)));
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", world_size.to_string());
            command.env("LOCAL_RANK", rank.to_string()).env("LOCAL_WORLD_SIZE", world_size.to_string());
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port_of(rank, port).to_string());
            command.env("FSDP_SECRET", "the secret of these tests");
            let said = File::create(dir.join(format!("rank-{rank}.txt"))).unwrap();
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(said).spawn().unwrap()
        };
        Self { children: (0..world_size).map(child).collect(), port }
    }

    /// `KILL` or `STOP`.
    pub(crate) fn signal(&self, rank: usize, signal: &str) {
        let command = format!("kill -{signal} {}", self.children[rank].id());
        assert!(Command::new("sh").args(["-c", &command]).status().unwrap().success());
    }

    pub(crate) fn has_ended(&mut self, rank: usize) -> bool {
        self.children[rank].try_wait().unwrap().is_some()
    }

    /// How a rank ends, within a limit.
    pub(crate) fn wait(&mut self, rank: usize, limit: Duration) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.children[rank].try_wait().unwrap() {
                return status;
            }
            assert!(begun.elapsed() < limit, "rank {rank} goes on for more than {limit:?}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// All of them end well.
    pub(crate) fn succeed(mut self, dir: &Path, limit: Duration) {
        for rank in 0..self.children.len() {
            let status = self.wait(rank, limit);
            assert!(status.success(), "rank {rank}: {status}: {}", said(dir, rank));
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What a rank has said of an error.
pub(crate) fn said(dir: &Path, rank: usize) -> String {
    fs::read_to_string(dir.join(format!("rank-{rank}.txt"))).unwrap()
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A way to a port that can be cut: connections stay, and nothing arrives any more.
pub(crate) struct Link {
    listener: Arc<TcpListener>,
    cut: Arc<AtomicBool>,
}

impl Link {
    pub(crate) fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        Self { listener: Arc::new(listener), cut: Arc::default() }
    }

    pub(crate) fn port(&self) -> u16 {
        self.listener.local_addr().unwrap().port()
    }

    /// Carries what comes to `port`, until this process ends.
    pub(crate) fn carry_to(&self, port: u16) {
        let (listener, cut) = (self.listener.clone(), self.cut.clone());
        thread::spawn(move || {
            for stream in listener.incoming() {
                let stream = stream.unwrap();
                // Nobody listens yet: the rank tries again.
                let Ok(other) = TcpStream::connect(("127.0.0.1", port)) else { continue };
                let ways = [(stream.try_clone(), other.try_clone()), (Ok(other), Ok(stream))];
                for (from, to) in ways {
                    let (from, to, cut) = (from.unwrap(), to.unwrap(), cut.clone());
                    thread::spawn(move || carry(from, to, &cut));
                }
            }
        });
    }

    pub(crate) fn cut(&self) {
        self.cut.store(true, SeqCst);
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream, cut: &AtomicBool) {
    let mut buffer = [0; 1 << 12];
    loop {
        match from.read(&mut buffer) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Ok(len) if len > 0 => {
                if !cut.load(SeqCst) && to.write_all(&buffer[..len]).is_err() {
                    return;
                }
            }
            _ => {
                // A cut link does not tell of an end either.
                if !cut.load(SeqCst) {
                    let _ = to.shutdown(Shutdown::Both);
                }
                return;
            }
        }
    }
}
