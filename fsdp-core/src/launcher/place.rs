//! Where a process runs: its host, and the cores that it may use there.

use std::fmt;

/// Where a process runs. Several of a host may share its cores, or a launcher may have bound each to some of them.
///
/// ```
/// use fsdp_core::ProcessPlace;
///
/// let all = ["a 0-3", "a 4-7", "a 4-7", "b 0-7"].map(ProcessPlace::read);
/// assert_eq!(all[0].share(&all), (4, 1));
/// assert_eq!(all[1].share(&all), (4, 2));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessPlace {
    host: String,
    /// As the kernel lists them: `0-3,8`.
    cores: String,
}

impl ProcessPlace {
    /// Where this process runs, as far as the system tells.
    pub fn own() -> Self {
        let read = |file| std::fs::read_to_string(file).unwrap_or_default();
        let status = read("/proc/self/status");
        let cores = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        let cores = cores.unwrap_or_default().trim().to_owned();
        // The same on all processes of a host, and on no other.
        Self { host: read("/proc/sys/kernel/random/boot_id").trim().to_owned(), cores }
    }

    /// A place as it prints.
    pub fn read(text: &str) -> Self {
        let (host, cores) = text.split_once(' ').unwrap_or((text, ""));
        Self { host: host.to_owned(), cores: cores.to_owned() }
    }

    /// How many cores this process may use, and how many of `all` processes, this one among them, may use some of the same.
    /// No core where the system does not tell.
    pub fn share(&self, all: &[ProcessPlace]) -> (usize, usize) {
        let num_cores = self.num_cores();
        let shares = |other: &&ProcessPlace| {
            other.host == self.host && Self::num_cores_of_any([self, *other]) < num_cores + other.num_cores()
        };
        (num_cores, all.iter().filter(shares).count())
    }

    /// Cores that any of some processes of one host may use.
    pub(crate) fn num_cores_of_any<'a>(places: impl IntoIterator<Item = &'a ProcessPlace>) -> usize {
        let range = |text: &str| {
            let (first, last) = text.split_once('-').unwrap_or((text, text));
            Some(first.parse::<usize>().ok()?..=last.parse().ok()?)
        };
        let lists = places.into_iter().flat_map(|place| place.cores.split(','));
        let mut cores: Vec<usize> = lists.filter_map(range).flatten().collect();
        cores.sort_unstable();
        cores.dedup();
        cores.len()
    }

    fn num_cores(&self) -> usize {
        Self::num_cores_of_any([self])
    }
}

impl fmt::Display for ProcessPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.host, self.cores)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_those_of_the_list_and_counted_once() {
        let count = |texts: &[&str]| {
            let places: Vec<ProcessPlace> = texts.iter().map(|text| ProcessPlace::read(text)).collect();
            ProcessPlace::num_cores_of_any(&places)
        };
        assert_eq!(count(&["a 0-3,8", "a 2-4", "a 8"]), 6);
        assert_eq!(count(&["a 0", "a 1"]), 2);
        assert_eq!(count(&["a", "a what", ""]), 0);
    }

    #[test]
    fn this_process_has_a_place_that_reads_back_as_it_prints() {
        let own = ProcessPlace::own();
        assert_eq!(ProcessPlace::read(&own.to_string()), own);
        let (num_cores, num_sharing) = own.share(&[own.clone(), own.clone(), ProcessPlace::read("elsewhere 0-3")]);
        assert!(num_cores > 0 && num_sharing == 2, "{own}");
    }

    #[test]
    fn ranks_share_cores_with_those_of_their_host_that_are_bound_to_the_same() {
        let unbound = ["a 0-7"; 4].map(ProcessPlace::read);
        assert_eq!(unbound[0].share(&unbound), (8, 4));
        let by_core = ["a 0", "a 1", "b 0"].map(ProcessPlace::read);
        assert_eq!(by_core.each_ref().map(|place| place.share(&by_core)), [(1, 1); 3]);
        let by_socket = ["a 0-7", "a 8-15", "a 0-7", "a 8-15"].map(ProcessPlace::read);
        assert_eq!(by_socket.each_ref().map(|place| place.share(&by_socket)), [(8, 2); 4]);
    }
}
