//! The variables that launchers set, and how they are read.

use super::{Environment, Launcher, LauncherError};

/// What one launcher calls its numbers.
#[derive(Debug)]
pub(super) struct Family {
    pub(super) launcher: Launcher,
    rank: &'static str,
    world_size: &'static str,
    local_rank: &'static str,
    local_size: &'static str,
    /// Whether the rank's variable may stand alone: SLURM sets it in batch scripts too, which are no ranks.
    rank_may_stand_alone: bool,
}

/// All of them, in the order in which they are looked for.
pub(super) const FAMILIES: [Family; 4] = [
    Family {
        launcher: Launcher::Mpirun,
        rank: "OMPI_COMM_WORLD_RANK",
        world_size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
        rank_may_stand_alone: false,
    },
    // MPICH's Hydra and SLURM's PMI.
    Family {
        launcher: Launcher::Mpirun,
        rank: "PMI_RANK",
        world_size: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_size: "MPI_LOCALNRANKS",
        rank_may_stand_alone: false,
    },
    Family {
        launcher: Launcher::Torchrun,
        rank: "RANK",
        world_size: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        local_size: "LOCAL_WORLD_SIZE",
        rank_may_stand_alone: false,
    },
    Family {
        launcher: Launcher::Srun,
        rank: "SLURM_PROCID",
        world_size: "SLURM_STEP_NUM_TASKS",
        local_rank: "SLURM_LOCALID",
        local_size: "SLURM_NTASKS_PER_NODE",
        rank_may_stand_alone: true,
    },
];

/// A launcher whose variables are there.
#[derive(Debug)]
pub(super) struct Seen<'a> {
    pub(super) family: &'a Family,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) local_rank: Option<usize>,
    pub(super) local_size: Option<usize>,
}

impl Family {
    /// `None` where none of its variables is set.
    pub(super) fn read(&self, variables: &Environment) -> Result<Option<Seen<'_>>, LauncherError> {
        let rank = number(variables, self.rank)?;
        let world_size = number(variables, self.world_size)?;
        let half = |set: &'static str, value: usize, missing| {
            Err(LauncherError::Half { launcher: self.launcher, set: format!("{set}={value}"), missing })
        };
        match (rank, world_size) {
            (None, None) => Ok(None),
            (Some(_), None) if self.rank_may_stand_alone => Ok(None),
            (Some(rank), None) => half(self.rank, rank, self.world_size),
            (None, Some(world_size)) => half(self.world_size, world_size, self.rank),
            (Some(rank), Some(world_size)) => {
                let local_rank = number(variables, self.local_rank)?;
                let local_size = number(variables, self.local_size)?;
                let seen = Seen { family: self, rank, world_size, local_rank, local_size };
                if rank < world_size {
                    return Ok(Some(seen));
                }
                Err(LauncherError::NoSuchRank { rank: seen.told_rank(), world_size: seen.told_size() })
            }
        }
    }
}

impl Seen<'_> {
    pub(super) fn told_rank(&self) -> String {
        format!("{}={}", self.family.rank, self.rank)
    }

    pub(super) fn told_size(&self) -> String {
        format!("{}={}", self.family.world_size, self.world_size)
    }

    pub(super) fn told(&self) -> String {
        format!("{}, {}", self.told_rank(), self.told_size())
    }
}

fn number(variables: &Environment, variable: &'static str) -> Result<Option<usize>, LauncherError> {
    let Some(value) = variables.get(variable) else { return Ok(None) };
    let refused = |_| LauncherError::NotANumber { variable, value: value.clone() };
    value.trim().parse().map(Some).map_err(refused)
}

/// Where rank 0 listens.
pub(super) fn rendezvous(
    variables: &Environment,
    launcher: Launcher,
    port: Option<u16>,
) -> Result<Option<(String, u16)>, LauncherError> {
    let told_port = match variables.get("MASTER_PORT") {
        None => None,
        Some(value) => {
            let refused = || LauncherError::NotAPort { value: value.clone() };
            Some(value.trim().parse::<u16>().ok().filter(|&port| port > 0).ok_or_else(refused)?)
        }
    };
    // Then torchrun itself listens at its port.
    let occupied = variables.get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
    let told_port = told_port.map(|port| if occupied { port.checked_add(1).unwrap_or(port - 1) } else { port });
    let host = variables.get("MASTER_ADDR").filter(|host| !host.is_empty()).cloned();
    match launcher {
        // MPI itself can tell the ranks where to meet.
        Launcher::Mpirun => Ok(host.zip(port.or(told_port))),
        Launcher::Torchrun => {
            let host = host.ok_or(LauncherError::NoAddress { launcher, missing: "MASTER_ADDR" })?;
            let port = port.or(told_port).ok_or(LauncherError::NoAddress { launcher, missing: "MASTER_PORT" })?;
            Ok(Some((host, port)))
        }
        Launcher::Srun => {
            let nodes = || variables.get("SLURM_STEP_NODELIST").and_then(|list| first_host(list));
            let host =
                host.or_else(nodes).ok_or(LauncherError::NoAddress { launcher, missing: "SLURM_STEP_NODELIST" })?;
            let port = port.or(told_port).unwrap_or_else(|| port_of_job(variables));
            Ok(Some((host, port)))
        }
    }
}

/// Jobs on one host seldom share it, and all ranks of a job know it.
fn port_of_job(variables: &Environment) -> u16 {
    let job = variables.get("SLURM_JOB_ID").and_then(|id| id.parse::<u64>().ok()).unwrap_or_default();
    15_000 + (job % 10_000) as u16
}

/// The first host of SLURM's short form, `node[03-05,9],gpu1`: `node03`.
fn first_host(list: &str) -> Option<String> {
    let end = list.find(['[', ',']).unwrap_or(list.len());
    let (name, rest) = list.split_at(end);
    let number = match rest.strip_prefix('[') {
        Some(numbers) => &numbers[..numbers.find(['-', ',', ']'])?],
        None => "",
    };
    Some(format!("{name}{number}")).filter(|host| !host.is_empty())
}
