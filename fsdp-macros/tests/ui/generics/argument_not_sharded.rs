//! A type argument that the nested field cannot take.

#[path = "../../fsdp/mod.rs"]
mod fsdp;

use fsdp_macros::Sharded;

struct Linear;

#[derive(Sharded)]
#[shard(crate = "fsdp")]
struct Model<T> {
    #[shard(units, nested)]
    blocks: Vec<T>,
}

fn policy() -> fsdp::WrapPolicy {
    <Model<Linear> as fsdp::Sharded>::wrap_policy()
}

fn main() {}
