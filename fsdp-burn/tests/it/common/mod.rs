//! Tiny models, deterministic data, and the one comparison helper of all parity tests.

#[cfg(feature = "cpu")]
pub(crate) mod broadcast;
pub(crate) mod files;
pub(crate) mod learner;
pub(crate) mod models;
#[cfg(feature = "mpi")]
pub(crate) mod mpirun;
pub(crate) mod process;
pub(crate) mod processes;
pub(crate) mod run;
pub(crate) mod wide;
