//! A variant without a module.

#[path = "../../fsdp/mod.rs"]
mod fsdp;

use fsdp_macros::Sharded;

struct Linear;

#[derive(Sharded)]
#[shard(crate = "fsdp")]
enum Mixer {
    Dense(Linear),
    #[shard(unit)]
    Nothing,
}

fn main() {}
