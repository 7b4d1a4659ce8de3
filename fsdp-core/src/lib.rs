//! Sharded training, without a tensor library.

mod comm;
mod dtype;
mod layout;
mod policy;
#[cfg(feature = "testing")]
pub mod testing;

pub use comm::{
    AbortCause, CommError, CommStream, Communicator, Fault, FaultPlan, Faulty, GatherPart, Issued, Link, LocalWorld,
    LoggedOp, OpCount, OpKind, OpTag, Pending, Phase, Recorder, Reduce, ReducePart, Timing, Traffic,
};
pub use dtype::Dtype;
pub use layout::ShardLayout;
pub use policy::{FieldRule, Role, UnitOverrides, WrapPolicy};
