//! Error messages before a run begins: what launchers say, and processes that look for each other.

use std::io::{Error as IoError, ErrorKind};
use std::time::Duration;

use fsdp_core::{Environment, Launcher, LauncherChoice, Refusal, RendezvousError, Secret, Started};

use super::Example;

/// What is said of an environment with the variables `text`.
fn launcher(variant: &'static str, text: &str, choice: LauncherChoice, world_size: usize) -> Example {
    let pairs = text.split_whitespace().map(|pair| pair.split_once('=').unwrap());
    let variables: Environment = pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    Example::new(variant, "", Started::find(&variables, choice, world_size, None).unwrap_err().to_string())
}

fn launchers() -> Vec<Example> {
    let auto = |variant, text| launcher(variant, text, LauncherChoice::Auto, 1);
    let torchrun = "RANK=1 WORLD_SIZE=4 MASTER_ADDR=node1 MASTER_PORT=29500";
    vec![
        auto("LauncherError::NotANumber", "RANK=one WORLD_SIZE=4"),
        auto("LauncherError::NotAPort", "RANK=1 WORLD_SIZE=4 MASTER_ADDR=node1 MASTER_PORT=70000"),
        auto("LauncherError::Half", "RANK=1"),
        auto("LauncherError::NoSuchRank", "RANK=4 WORLD_SIZE=4"),
        auto("LauncherError::Disagree", "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 RANK=1 WORLD_SIZE=4"),
        auto(
            "LauncherError::Alone",
            "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2",
        ),
        launcher("LauncherError::WorldSize", torchrun, LauncherChoice::Auto, 8),
        launcher("LauncherError::NotThere", "", LauncherChoice::Only(Launcher::Srun), 1),
        auto("LauncherError::NoAddress", "RANK=1 WORLD_SIZE=4"),
    ]
}

fn meetings() -> Vec<Example> {
    let of = |variant, error: RendezvousError| Example::new(variant, "", error.to_string());
    let address = || "node1:29500".to_owned();
    let waited = Duration::from_secs(300);
    let listen =
        RendezvousError::Listen { address: "0.0.0.0:29500".into(), source: IoError::from(ErrorKind::AddrInUse) };
    let reason = ErrorKind::ConnectionRefused.to_string();
    let no_answer = RendezvousError::NoAnswer { rank: 1, wanted: 0, address: address(), waited, reason };
    let refused = RendezvousError::Refused { rank: 1, address: address(), refusal: Refusal::Secret };
    let sent_away = vec![format!("10.0.0.7:51234: {}", Refusal::NotOurs)];
    let missing =
        RendezvousError::Missing { rank: 0, address: address(), waited, missing: vec![2, 3], refused: sent_away };
    let ended = RendezvousError::Ended { rank: 1, cause: "rank 0 failed: the data set is empty".into() };
    let no_value = RendezvousError::NoValue { rank: 1, key: "seed".into(), waited };
    let source = IoError::from(ErrorKind::PermissionDenied);
    vec![
        of("RendezvousError::Listen", listen),
        of("RendezvousError::NoAnswer", no_answer),
        of("RendezvousError::Refused", refused),
        of("RendezvousError::Missing", missing),
        of("RendezvousError::NoSecret", Secret::of_variable(None).unwrap_err()),
        of("RendezvousError::Ended", ended),
        of("RendezvousError::NoValue", no_value),
        of("RendezvousError::Io", RendezvousError::Io { rank: 1, what: "cannot wait for connections", source }),
    ]
}

pub(super) fn examples() -> Vec<Example> {
    [launchers(), meetings()].concat()
}
