//! Two mistakes in two fields: both are reported, and the use of the type as `Sharded` is not.

#[path = "../../fsdp/mod.rs"]
mod fsdp;

use fsdp_macros::Sharded;

struct Linear;

#[derive(Sharded)]
#[shard(crate = "fsdp")]
struct Model {
    #[shard(unit, kep)]
    first: Linear,
    #[shard(unit)]
    fine: Linear,
    #[shard(replicate, offload = "gpu")]
    second: Linear,
}

fn needs_sharded<T: fsdp::Sharded>() {}

fn use_as_sharded() {
    needs_sharded::<Model>();
}

fn main() {}
