//! Runs of processes that `mpirun` has started, on this host or on several that are not there.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// A run. Whatever is left of it ends with it.
pub(crate) struct Run {
    launcher: Child,
    /// The first variable that was set, which no other run's processes have: the daemons of other hosts are no children of the launcher.
    mark: String,
}

impl Run {
    /// The test `test` of this binary as each of `world_size` ranks on this host, with `options` for `mpirun`. `MPIRUN` is the
    /// command; default: Open MPI's, as many processes as asked for, also for root.
    pub(crate) fn here(test: &str, dir: &Path, world_size: usize, options: &[&str], set: &[(&str, String)]) -> Self {
        let mpirun =
            std::env::var("MPIRUN").unwrap_or_else(|_| "mpirun --allow-run-as-root --oversubscribe".to_owned());
        let mut words = mpirun.split_whitespace();
        let mut command = Command::new(words.next().unwrap());
        command.args(words).args(options).args(["-n", &world_size.to_string()]);
        Self::start(command, test, dir, set)
    }

    /// The same on `num_hosts` hosts, made by `.ci/hosts`. Ranks are dealt out to them in turn.
    pub(crate) fn on_hosts(
        test: &str,
        dir: &Path,
        num_hosts: usize,
        world_size: usize,
        set: &[(&str, String)],
    ) -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.ci/hosts");
        let mut command = Command::new("bash");
        command.arg(script).arg(num_hosts.to_string()).arg("--");
        command.args(["sh", "-c", "exec mpirun.openmpi $HOSTS_MPIRUN \"$@\"", "sh", "-n", &world_size.to_string()]);
        for (name, _) in set {
            command.args(["-x", *name]);
        }
        Self::start(command, test, dir, set)
    }

    fn start(mut command: Command, test: &str, dir: &Path, set: &[(&str, String)]) -> Self {
        command.arg(std::env::current_exe().unwrap()).args(["--exact", test, "--nocapture"]);
        command.envs(set.iter().map(|(name, value)| (name, value)));
        command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
        let said = fs::File::create(dir.join("said.txt")).unwrap();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(said);
        let (name, value) = &set[0];
        Self { launcher: command.spawn().unwrap(), mark: format!("{name}={value}") }
    }

    /// Whether all end well, within a limit.
    pub(crate) fn succeeds(&mut self, limit: Duration) -> bool {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.launcher.try_wait().unwrap() {
                return status.success();
            }
            assert!(begun.elapsed() < limit, "a run goes on for more than {limit:?}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// The process of each rank.
    pub(crate) fn ranks(&self) -> BTreeMap<usize, u32> {
        let exe = std::env::current_exe().unwrap();
        let is_ours = |pid: &u32| fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|of| of == exe);
        let pids = processes().map(|(pid, _)| pid).filter(is_ours);
        pids.filter_map(|pid| Some((rank_of(pid, &self.mark)?, pid))).collect()
    }

    /// Sends a signal, by its name, to a process.
    pub(crate) fn signal(pid: u32, signal: &str) {
        assert!(Command::new("kill").args([&format!("-{signal}"), &pid.to_string()]).status().unwrap().success());
    }

    /// Sets the link of a host, counted from 1, `up` or `down`.
    pub(crate) fn set_link(&self, host: usize, state: &str) {
        // Named after the process of the script that has made it.
        let name = format!("f{}-host{host}", self.launcher.id());
        let status = Command::new("ip").args(["-n", &name, "link", "set", "net0", state]).status().unwrap();
        assert!(status.success(), "the link of {name} is not set {state}");
    }

    /// Ends the launcher, which is asked to end its processes first.
    pub(crate) fn end(&mut self) {
        for signal in ["TERM", "KILL"] {
            // Under a script, it is what the script has started.
            for pid in self.family().into_iter().filter(|&pid| is_named(pid, "mpirun")) {
                let _ = Command::new("kill").args([&format!("-{signal}"), &pid.to_string()]).status();
            }
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_secs(10) {
                if self.launcher.try_wait().unwrap().is_some() {
                    return;
                }
                thread::sleep(Duration::from_millis(20));
            }
        }
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
    }

    /// The launcher, its children, and theirs.
    fn family(&self) -> Vec<u32> {
        let mut found = vec![self.launcher.id()];
        let mut next = 0;
        while let Some(parent) = found.get(next).copied() {
            next += 1;
            found.extend(processes().filter(|&(_, of)| of == parent).map(|(pid, _)| pid));
        }
        found
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if self.launcher.try_wait().unwrap().is_none() {
            self.end();
        }
    }
}

/// Whether a process exists.
pub(crate) fn exists(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

/// All processes with their parents.
fn processes() -> impl Iterator<Item = (u32, u32)> {
    let pids = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(|pid: u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // Behind the name, which may hold anything: the state, then the parent.
        let parent = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()?;
        Some((pid, parent))
    })
}

fn is_named(pid: u32, name: &str) -> bool {
    fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|of| of.starts_with(name) || of.starts_with("orterun"))
}

/// What its launcher has told a process that has the mark.
fn rank_of(pid: u32, mark: &str) -> Option<usize> {
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let variables = || environment.split(|&byte| byte == 0).filter_map(|variable| std::str::from_utf8(variable).ok());
    variables().find(|variable| *variable == mark)?;
    variables().find_map(|variable| variable.strip_prefix("OMPI_COMM_WORLD_RANK="))?.parse().ok()
}
