//! Sharded training, without a tensor library.

mod comm;
mod dtype;
mod layout;
mod policy;

pub use comm::{
    AbortCause, CommError, Communicator, GatherPart, Issued, LocalWorld, OpKind, OpTag, Phase, Reduce, ReducePart,
};
pub use dtype::Dtype;
pub use layout::ShardLayout;
pub use policy::{FieldRule, Role, UnitOverrides, WrapPolicy};
