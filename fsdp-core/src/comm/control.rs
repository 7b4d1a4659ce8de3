//! What a communicator between processes needs of the run's control channel.

use std::fmt::Debug;

use super::{AbortCause, Issued};

/// What a communicator between processes needs of the run's control channel.
pub trait Control: Send + Sync + Debug {
    /// Tells every rank why the run ends. The first cause wins.
    fn abort(&self, cause: AbortCause);
    /// Why the run was aborted, if it was. Costs no communication.
    fn aborted(&self) -> Option<AbortCause>;
    /// This rank's program has returned.
    fn leave(&self);
    /// Tells what this rank waits in, or that it waits no more.
    fn waiting(&self, operation: Option<Issued>);
}
