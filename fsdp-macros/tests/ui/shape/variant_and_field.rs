//! Attributes on the variant and on its module.

#[path = "../../fsdp/mod.rs"]
mod fsdp;

use fsdp_macros::Sharded;

struct Linear;

#[derive(Sharded)]
#[shard(crate = "fsdp")]
enum Mixer {
    #[shard(unit)]
    Dense(#[shard(keep)] Linear),
}

fn main() {}
