//! Sharded training, without a tensor library.

mod dtype;
mod layout;
mod policy;

pub use dtype::Dtype;
pub use layout::ShardLayout;
pub use policy::{FieldRule, Role, UnitOverrides, WrapPolicy};
