//! A variant whose module has a name of its own.

#[path = "../../fsdp/mod.rs"]
mod fsdp;

use fsdp_macros::Sharded;

struct Linear;

#[derive(Sharded)]
#[shard(crate = "fsdp")]
enum Mixer {
    Dense {
        #[shard(unit)]
        layer: Linear,
    },
}

fn main() {}
