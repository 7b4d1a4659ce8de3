//! Environments as launchers set them, and as they should not be.

use super::*;

fn variables(text: &str) -> Environment {
    let pairs = text.split_whitespace().map(|pair| pair.split_once('=').unwrap());
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

fn find(text: &str) -> Result<String, String> {
    let found = Started::find(&variables(text), LauncherChoice::Auto, 1, None);
    found.map(|started| started.to_string()).map_err(|error| error.to_string())
}

#[test]
fn every_launcher_is_found_by_what_it_sets() {
    let table = [
        ("", "ranks are threads of this process"),
        ("HOME=x SLURM_JOB_ID=7", "ranks are threads of this process"),
        // A batch script, and a shell inside of an allocation.
        ("SLURM_PROCID=0 SLURM_NTASKS=4", "ranks are threads of this process"),
        ("SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=1", "ranks are threads of this process"),
        (
            "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1",
            "rank 3 of 4, a process of mpirun (OMPI_COMM_WORLD_RANK=3, OMPI_COMM_WORLD_SIZE=4)",
        ),
        // Open MPI 5 and PMIx set those of PMI too.
        (
            "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 PMI_RANK=3 PMI_SIZE=4",
            "rank 3 of 4, a process of mpirun (OMPI_COMM_WORLD_RANK=3, OMPI_COMM_WORLD_SIZE=4)",
        ),
        // `mpirun` in a shell that `srun` has started with PMI.
        (
            "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 PMI_RANK=0 PMI_SIZE=1",
            "rank 3 of 4, a process of mpirun (OMPI_COMM_WORLD_RANK=3, OMPI_COMM_WORLD_SIZE=4)",
        ),
        ("PMI_RANK=0 PMI_SIZE=2", "rank 0 of 2, a process of mpirun (PMI_RANK=0, PMI_SIZE=2)"),
        (
            "PMI_RANK=1 PMI_SIZE=2 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=a[1-2]",
            "rank 1 of 2, a process of mpirun (PMI_RANK=1, PMI_SIZE=2)",
        ),
        (
            "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2",
            "rank 5 of 8, a process of mpirun (OMPI_COMM_WORLD_RANK=5, OMPI_COMM_WORLD_SIZE=8)",
        ),
        (
            "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=5000",
            "rank 0 of 2, a process of mpirun (OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=2), meeting at h:5000",
        ),
        (
            "RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500",
            "rank 1 of 2, a process of torchrun (RANK=1, WORLD_SIZE=2), meeting at 10.0.0.1:29500",
        ),
        (
            "RANK=1 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=29500 TORCHELASTIC_USE_AGENT_STORE=True",
            "rank 1 of 2, a process of torchrun (RANK=1, WORLD_SIZE=2), meeting at h:29501",
        ),
        (
            "RANK=7 WORLD_SIZE=8 MASTER_ADDR=h MASTER_PORT=1 TORCHELASTIC_RUN_ID=x SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2",
            "rank 7 of 8, a process of torchrun (RANK=7, WORLD_SIZE=8), meeting at h:1",
        ),
        (
            "SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NODELIST=node[03-05,9],gpu1 SLURM_JOB_ID=1234567",
            "rank 2 of 4, a process of srun (SLURM_PROCID=2, SLURM_STEP_NUM_TASKS=4), meeting at node03:19567",
        ),
        (
            "SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NODELIST=gpu1,gpu2 MASTER_PORT=4000",
            "rank 2 of 4, a process of srun (SLURM_PROCID=2, SLURM_STEP_NUM_TASKS=4), meeting at gpu1:4000",
        ),
    ];
    for (text, expected) in table {
        assert_eq!(find(text).as_deref(), Ok(expected), "{text}");
    }
}

#[test]
fn what_does_not_fit_together_is_refused_with_place_value_and_remedy() {
    let table: [(&str, &[&str]); 13] = [
        ("RANK=x WORLD_SIZE=2", &["RANK=\"x\" is not a number", "`launcher = \"threads\"`"]),
        ("PMI_RANK=-1 PMI_SIZE=2", &["PMI_RANK=\"-1\" is not a number"]),
        ("OMPI_COMM_WORLD_RANK=1", &["OMPI_COMM_WORLD_RANK=1 is set, but OMPI_COMM_WORLD_SIZE is not", "mpirun"]),
        ("WORLD_SIZE=2", &["WORLD_SIZE=2 is set, but RANK is not", "torchrun"]),
        ("SLURM_STEP_NUM_TASKS=2", &["SLURM_STEP_NUM_TASKS=2 is set, but SLURM_PROCID is not", "srun"]),
        ("RANK=2 WORLD_SIZE=2", &["RANK=2, but WORLD_SIZE=2", "counted from 0"]),
        ("PMI_RANK=0 PMI_SIZE=0", &["PMI_RANK=0, but PMI_SIZE=0"]),
        ("RANK=0 WORLD_SIZE=2 MASTER_PORT=1", &["MASTER_ADDR is not set", "Set MASTER_ADDR"]),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=h", &["MASTER_PORT is not set"]),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=70000", &["MASTER_PORT=\"70000\" is not a port"]),
        (
            "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 RANK=1 WORLD_SIZE=4",
            &["mpirun says OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=2, but torchrun says RANK=1, WORLD_SIZE=4"],
        ),
        (
            "RANK=3 WORLD_SIZE=8 MASTER_ADDR=h MASTER_PORT=1 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2",
            &["torchrun says RANK=3, WORLD_SIZE=8, but srun says SLURM_PROCID=1", "`launcher = \"torchrun\"`"],
        ),
        (
            "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2",
            &["mpirun says OMPI_COMM_WORLD_SIZE=1, but srun has started several", "--mpi=pmix"],
        ),
    ];
    for (text, parts) in table {
        let error = find(text).unwrap_err();
        for part in parts {
            assert!(error.contains(part), "{text}: {error:?} lacks {part:?}");
        }
    }
}

#[test]
fn the_world_size_of_the_configuration_is_the_launchers_or_left_out() {
    let torchrun = variables("RANK=1 WORLD_SIZE=4 MASTER_ADDR=h MASTER_PORT=1");
    let find = |world_size| Started::find(&torchrun, LauncherChoice::Auto, world_size, None);
    for world_size in [1, 4] {
        assert!(matches!(find(world_size), Ok(Started::Process(ProcessRank { world_size: 4, rank: 1, .. }))));
    }
    let error = find(2).unwrap_err().to_string();
    assert!(error.contains("`world_size` is 2, but torchrun says WORLD_SIZE=4"), "{error}");
    // Threads of a process that nobody has started as one of several.
    assert_eq!(Started::find(&Environment::new(), LauncherChoice::Auto, 4, None), Ok(Started::Threads));
    let alone = variables("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1");
    assert_eq!(Started::find(&alone, LauncherChoice::Auto, 4, None), Ok(Started::Threads));
}

#[test]
fn a_choice_looks_at_one_launcher_only() {
    let both = variables(
        "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 RANK=1 WORLD_SIZE=4 MASTER_ADDR=h MASTER_PORT=1 SLURM_PROCID=x",
    );
    let find = |choice| Started::find(&both, choice, 1, Some(4000));
    assert_eq!(find(LauncherChoice::Threads), Ok(Started::Threads));
    let Ok(Started::Process(process)) = find(LauncherChoice::Only(Launcher::Torchrun)) else { panic!() };
    assert_eq!(
        (process.rank, process.rendezvous),
        (1, Some(("h".to_owned(), 4000))),
        "the port is the configuration's"
    );
    let Ok(Started::Process(process)) = find(LauncherChoice::Only(Launcher::Mpirun)) else { panic!() };
    assert_eq!((process.rank, process.world_size), (0, 2));
    let nobody = Started::find(&Environment::new(), LauncherChoice::Only(Launcher::Srun), 1, None);
    assert_eq!(nobody, Err(LauncherError::NotThere { launcher: Launcher::Srun }));
}

#[test]
fn a_rank_knows_where_it_can_whether_rank_0_is_on_its_host() {
    let table = [
        ("LOCAL_RANK=1 MASTER_ADDR=h", true),
        // The second process of the second host.
        ("LOCAL_RANK=0 MASTER_ADDR=h", false),
        ("MASTER_ADDR=h", false),
        ("MASTER_ADDR=127.0.0.1", true),
        ("MASTER_ADDR=::1", true),
        ("MASTER_ADDR=localhost", true),
    ];
    for (text, expected) in table {
        let set = variables(&format!("RANK=1 WORLD_SIZE=4 MASTER_PORT=1 {text}"));
        let Ok(Started::Process(process)) = Started::find(&set, LauncherChoice::Auto, 1, None) else { panic!() };
        assert_eq!(process.is_beside_rank_0(), expected, "{text}");
    }
}
