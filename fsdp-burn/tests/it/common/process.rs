//! Tests that need a process of their own run this binary again, with one test.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// A child takes longer than this only if it hangs.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

/// This binary, to run `test` alone.
pub(crate) fn child(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]);
    command
}

/// As [`child`], where a file that reaches its limit is an error to whoever writes it, and no signal.
pub(crate) fn child_with_file_limits(test: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' XFSZ; exec \"$0\" --exact \"$1\" --nocapture"]);
    command.arg(std::env::current_exe().unwrap()).arg(test);
    command
}

/// Lets no file of this process grow beyond so many bytes: to whoever writes one that is a disk that is full.
pub(crate) fn limit_files(bytes: Option<u64>) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Fsize);
    setrlimit(Resource::Fsize, Rlimit { current: bytes, maximum }).unwrap();
}

/// Runs a child to its end, and returns what it has printed. One that hangs or fails is a failure of the test.
pub(crate) fn run_to_end(command: &mut Command) -> String {
    fn read(mut pipe: impl Read + Send + 'static) -> thread::JoinHandle<String> {
        thread::spawn(move || {
            let mut text = String::new();
            pipe.read_to_string(&mut text).unwrap();
            text
        })
    }
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (output, errors) = (read(child.stdout.take().unwrap()), read(child.stderr.take().unwrap()));
    let started = Instant::now();
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if started.elapsed() > LIMIT => {
                child.kill().unwrap();
                break child.wait().unwrap();
            }
            None => thread::sleep(Duration::from_millis(2)),
        }
    };
    let text = output.join().unwrap() + &errors.join().unwrap();
    assert!(status.success() && text.contains("1 passed"), "{status} after {:?}: {text}", started.elapsed());
    text
}

/// What the environment of a child says, if this is one.
pub(crate) fn told(name: &str) -> Option<std::path::PathBuf> {
    std::env::var_os(name).map(|value| Path::new(&value).to_owned())
}
