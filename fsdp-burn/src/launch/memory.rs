//! Keeps what tensors free for the next ones.
//!
//! Each op of a step frees tensors and makes others of the same sizes. glibc gives large ones back to the system as soon as
//! they are freed, and the system clears every page of the next one: in a small GPT on two cores that is a sixth of a step.

use std::env;

use fsdp_core::Config;

/// What is kept: single tensors of up to 32 MiB, which is the most that glibc takes, and so much at the end of each of its heaps.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const KEPT: [(i32, i32); 2] = [(libc::M_MMAP_THRESHOLD, 32 << 20), (libc::M_TRIM_THRESHOLD, 256 << 20)];

/// Lets glibc's allocator keep freed memory, for the rest of the process.
///
/// Leaves it alone where the environment says how it should be, and where state is on a disk: there memory is scarcer than
/// time. Another allocator does not notice.
pub(super) fn keep_freed(config: &Config) {
    if config.offload.nvme_path.is_some() || env::vars_os().any(|(name, _)| is_setting(&name.to_string_lossy())) {
        return;
    }
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    for (setting, bytes) in KEPT {
        // SAFETY: The function takes plain numbers, at any time and on any thread.
        unsafe { libc::mallopt(setting, bytes) };
    }
}

/// Whether a variable of the environment is one of glibc's about its allocator.
fn is_setting(name: &str) -> bool {
    name == "GLIBC_TUNABLES" || (name.starts_with("MALLOC_") && name.ends_with('_'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_the_allocator_are_known_by_their_names() {
        assert!(["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"].into_iter().all(is_setting));
        assert!(!["MIMALLOC_PURGE_DELAY", "PATH"].into_iter().any(is_setting));
    }

    /// Faults of this thread's pages, by the system.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    fn num_faults() -> u64 {
        let text = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        let fields = text.rsplit_once(')').unwrap().1;
        fields.split_whitespace().nth(7).unwrap().parse().unwrap()
    }

    #[test]
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    fn memory_that_is_freed_is_there_for_the_next_tensor() {
        keep_freed(&Config::default());
        let fill = || assert!(std::hint::black_box(vec![1_u8; 16 << 20]).iter().all(|&byte| byte == 1));
        fill();
        let before = num_faults();
        (0..8).for_each(|_| fill());
        // Of 4 KiB pages eight such blocks have 32768.
        assert!(num_faults() - before < 4096, "{}", num_faults() - before);
    }
}
