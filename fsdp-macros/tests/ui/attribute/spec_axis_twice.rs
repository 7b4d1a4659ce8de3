//! An axis for two dimensions.

#[path = "../../fsdp/mod.rs"]
mod fsdp;

use fsdp_macros::Sharded;

struct Linear;

#[derive(Sharded)]
#[shard(crate = "fsdp")]
struct Model {
    #[shard(spec("shard", "shard"))]
    field: Linear,
}

fn main() {}
