//! Whole and cut at once.

#[path = "../../fsdp/mod.rs"]
mod fsdp;

use fsdp_macros::Sharded;

struct Linear;

#[derive(Sharded)]
#[shard(crate = "fsdp")]
struct Model {
    #[shard(replicate, spec("shard"))]
    field: Linear,
}

fn main() {}
