//! A variant that is not one module.

#[path = "../../fsdp/mod.rs"]
mod fsdp;

use fsdp_macros::Sharded;

struct Linear;

#[derive(Sharded)]
#[shard(crate = "fsdp")]
enum Mixer {
    #[shard(unit)]
    Both(Linear, Linear),
}

fn main() {}
