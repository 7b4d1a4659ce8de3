//! Who started this process, and which rank of how many it is: read from the environment, decided without it.
//!
//! Looked for in this order: `mpirun`, `torchrun`, `srun`; else the ranks are threads. One launcher may start another, as
//! `srun` starts one `torchrun` per host; the inner one counts, unless it knows of one process only where the outer one
//! has started several.

mod error;
mod place;
mod variables;

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

pub use error::LauncherError;
pub use place::ProcessPlace;
use variables::{FAMILIES, Family, Seen};

/// The variables of a process.
pub type Environment = BTreeMap<String, String>;

/// What starts processes as ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// `mpirun` or `mpiexec` of Open MPI or MPICH, or another that speaks PMI.
    Mpirun,
    /// PyTorch's `torchrun`, or whatever sets its variables.
    Torchrun,
    /// SLURM's `srun`.
    Srun,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Launcher::Mpirun => "mpirun",
            Launcher::Torchrun => "torchrun",
            Launcher::Srun => "srun",
        })
    }
}

/// Which launcher to look for: key `launcher` of the configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LauncherChoice {
    /// Whichever is there.
    #[default]
    Auto,
    /// None: ranks are threads, whatever the environment says.
    Threads,
    /// This one, whatever else is there.
    Only(Launcher),
}

impl LauncherChoice {
    /// All choices, in the order of [`LauncherChoice::NAMES`].
    pub const ALL: [LauncherChoice; 5] = [
        LauncherChoice::Auto,
        LauncherChoice::Threads,
        LauncherChoice::Only(Launcher::Mpirun),
        LauncherChoice::Only(Launcher::Torchrun),
        LauncherChoice::Only(Launcher::Srun),
    ];

    /// What the choices are called.
    pub const NAMES: [&str; 5] = ["auto", "threads", "mpirun", "torchrun", "srun"];
}

/// How the ranks of a run are started, as one process sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Started {
    /// All ranks are threads of this process.
    Threads,
    /// This process is one rank.
    Process(ProcessRank),
}

/// A process that is one rank of several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessRank {
    /// Who started it.
    pub launcher: Launcher,
    /// Its number, from 0.
    pub rank: usize,
    /// Processes of the run.
    pub world_size: usize,
    /// Its number among the processes of its host, if the launcher tells.
    pub local_rank: Option<usize>,
    /// Processes of its host, if the launcher tells.
    pub local_size: Option<usize>,
    /// Where rank 0 listens, if the environment tells: a host and a port.
    pub rendezvous: Option<(String, u16)>,
    /// The variables that told, for the eye.
    told_by: String,
}

impl Started {
    /// Reads where this process is. `world_size` is the configuration's, of which 1 leaves the number to the launcher;
    /// `port` replaces the launcher's.
    ///
    /// # Errors
    /// If variables are incomplete or no numbers, if launchers contradict each other, or the world size is another than the
    /// configuration's. Every error tells variable, value and remedy.
    ///
    /// ```
    /// use fsdp_core::{Environment, LauncherChoice, Started};
    ///
    /// let set = [("RANK", "2"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "host1"), ("MASTER_PORT", "29500")];
    /// let variables: Environment = set.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    /// let started = Started::find(&variables, LauncherChoice::Auto, 1, None)?;
    /// assert_eq!(started.to_string(), "rank 2 of 4, a process of torchrun (RANK=2, WORLD_SIZE=4), meeting at host1:29500");
    /// # Ok::<(), fsdp_core::LauncherError>(())
    /// ```
    pub fn find(
        variables: &Environment,
        choice: LauncherChoice,
        world_size: usize,
        port: Option<u16>,
    ) -> Result<Self, LauncherError> {
        let wanted = |family: &&Family| match choice {
            LauncherChoice::Auto => true,
            LauncherChoice::Threads => false,
            LauncherChoice::Only(launcher) => family.launcher == launcher,
        };
        let seen = FAMILIES.iter().filter(wanted).map(|family| family.read(variables));
        let seen: Vec<Seen> = seen.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect();
        let Some(first) = seen.first() else {
            return match choice {
                LauncherChoice::Only(launcher) => Err(LauncherError::NotThere { launcher }),
                LauncherChoice::Auto | LauncherChoice::Threads => Ok(Started::Threads),
            };
        };
        for other in &seen[1..] {
            check_agreement(variables, first, other)?;
        }
        let launcher = first.family.launcher;
        // A shell inside an allocation is a step of one task.
        if launcher == Launcher::Srun && first.world_size == 1 && choice == LauncherChoice::Auto {
            return Ok(Started::Threads);
        }
        if world_size != 1 && world_size != first.world_size {
            return Err(LauncherError::WorldSize { configured: world_size, launcher, told: first.told_size() });
        }
        Ok(Started::Process(ProcessRank {
            launcher,
            rank: first.rank,
            world_size: first.world_size,
            local_rank: first.local_rank,
            local_size: first.local_size,
            rendezvous: variables::rendezvous(variables, launcher, port)?,
            told_by: format!("{}, {}", first.told_rank(), first.told_size()),
        }))
    }
}

/// `first` is the inner one, if one has started the other.
fn check_agreement(variables: &Environment, first: &Seen, other: &Seen) -> Result<(), LauncherError> {
    if (first.rank, first.world_size) == (other.rank, other.world_size) {
        return Ok(());
    }
    let (inner, outer) = (first.family.launcher, other.family.launcher);
    if first.world_size == 1 && other.world_size > 1 {
        let (told, outer_told) = (first.told_size(), other.told_size());
        return Err(LauncherError::Alone { inner, told, outer, outer_told });
    }
    // SLURM starts the daemons of the others, whose processes inherit its variables.
    let nested = match (inner, outer) {
        (Launcher::Mpirun, Launcher::Srun) => true,
        // A shell inside of an allocation is alone, for whichever MPI started it.
        (Launcher::Mpirun, Launcher::Mpirun) => other.world_size == 1,
        (Launcher::Torchrun, Launcher::Srun) => variables.contains_key("TORCHELASTIC_RUN_ID"),
        _ => false,
    };
    if nested {
        return Ok(());
    }
    Err(LauncherError::Disagree { first: inner, told: first.told(), second: outer, second_told: other.told() })
}

impl Started {
    /// Whether this process has rank 0, which prints.
    pub fn is_main(&self) -> bool {
        match self {
            Started::Threads => true,
            Started::Process(process) => process.rank == 0,
        }
    }
}

impl ProcessRank {
    /// Whether rank 0 is known to be a process of this host.
    pub fn is_beside_rank_0(&self) -> bool {
        let is_loopback =
            |host: &str| host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
        // As many ranks as there are below this one are on its host.
        self.local_rank == Some(self.rank) || self.rendezvous.as_ref().is_some_and(|(host, _)| is_loopback(host))
    }
}

impl fmt::Display for Started {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Started::Threads => f.write_str("ranks are threads of this process"),
            Started::Process(process) => process.fmt(f),
        }
    }
}

impl fmt::Display for ProcessRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { launcher, rank, world_size, rendezvous, told_by, .. } = self;
        write!(f, "rank {rank} of {world_size}, a process of {launcher} ({told_by})")?;
        match rendezvous {
            Some((host, port)) => write!(f, ", meeting at {host}:{port}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
