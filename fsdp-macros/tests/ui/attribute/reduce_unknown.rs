//! An element type of gradients by a foreign name: the nearest is named.

#[path = "../../fsdp/mod.rs"]
mod fsdp;

use fsdp_macros::Sharded;

struct Linear;

#[derive(Sharded)]
#[shard(crate = "fsdp")]
struct Model {
    #[shard(unit, reduce = "float16")]
    field: Linear,
}

fn main() {}
