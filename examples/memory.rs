//! What the process may hold, and how soon it gives back what it does not.

use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::{Args, Failure};

/// glibc's setting of the size from which it asks the system for memory, and gives it back when it is freed. Other allocators
/// do not look at it.
const RETURN_FROM: &str = "MALLOC_MMAP_THRESHOLD_";
const RETURN_FROM_BYTES: &str = "131072";

/// A number of bytes on the command line: `1500000`, `512MiB` or `1.5GiB`.
///
/// # Errors
/// If it is no such number, or none that is larger than 0.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let units = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40), ("", 0)];
    let (number, shift) =
        units.iter().find_map(|(unit, shift)| Some((text.strip_suffix(unit)?.trim(), shift))).unwrap_or((text, &0));
    match number.parse::<f64>() {
        Ok(number) if number > 0.0 && number.is_finite() => Ok((number * (1u64 << shift) as f64) as u64),
        _ => Err("write bytes, as 1500000, 512MiB or 1.5GiB".to_owned()),
    }
}

/// Lets the process have no more memory of its own than so many bytes, stacks of threads included (`RLIMIT_DATA`). An
/// allocation beyond it fails, which ends a Rust program.
///
/// # Errors
/// If the system refuses.
pub fn limit_memory(bytes: u64) -> Result<(), Failure> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Data);
    let refused = |source: rustix::io::Errno| Failure::Option {
        option: "--memory-limit",
        problem: format!("the system refuses it: {source}"),
    };
    setrlimit(Resource::Data, Rlimit { current: Some(bytes), maximum }).map_err(refused)
}

/// The largest resident set of the process so far, in bytes, as the system counts it; `None` where it does not tell.
pub fn resident_peak() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
}

/// As [`give_memory_back`], if this run is about memory: it has a limit, or places state on a disk.
pub fn give_memory_back_if_scarce(args: &Args) {
    let offloads = || args.resolve_config().is_ok_and(|config| config.offload.nvme_path.is_some());
    if args.memory_limit.is_some() || offloads() {
        give_memory_back();
    }
}

/// Starts the program again with a system's allocator that gives freed tensors back to the system at once. Costs page
/// faults, so it is for runs that have less memory than time.
///
/// glibc takes the setting when the program starts, and from the environment alone; one that is there already stays.
/// Where the program cannot be started again it goes on as it is, and says so.
pub fn give_memory_back() {
    if std::env::var_os(RETURN_FROM).is_none()
        && let Ok(program) = std::env::current_exe()
    {
        let error = Command::new(program).args(std::env::args_os().skip(1)).env(RETURN_FROM, RETURN_FROM_BYTES).exec();
        eprintln!("memory that is freed may stay with the process: the program cannot be started again: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_and_without_units() {
        for (text, bytes) in [("4096", 4096), ("512MiB", 512 << 20), ("1.5GiB", 3 << 29), ("2 KiB", 2048)] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "MiB", "-1", "0", "much", "1GB", "inf"] {
            assert!(parse_bytes(text).unwrap_err().contains("512MiB"), "{text}");
        }
    }

    #[test]
    fn the_system_tells_what_is_resident() {
        let block = vec![1u8; 32 << 20];
        assert!(resident_peak().unwrap() > block.len() as u64);
    }
}
