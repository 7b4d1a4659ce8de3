//! An output type on a field that is no unit.

#[path = "../../fsdp/mod.rs"]
mod fsdp;

use fsdp_macros::Sharded;

struct Linear;

#[derive(Sharded)]
#[shard(crate = "fsdp")]
struct Model {
    #[shard(output = "f32")]
    field: Linear,
}

fn main() {}
