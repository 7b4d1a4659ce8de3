//! A setting of a unit where there is no unit.

#[path = "../../fsdp/mod.rs"]
mod fsdp;

use fsdp_macros::Sharded;

struct Linear;

#[derive(Sharded)]
#[shard(crate = "fsdp")]
struct Model {
    #[shard(keep)]
    field: Linear,
}

fn main() {}
