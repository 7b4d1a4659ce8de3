//! A depth in quotes.

#[path = "../../fsdp/mod.rs"]
mod fsdp;

use fsdp_macros::Sharded;

struct Linear;

#[derive(Sharded)]
#[shard(crate = "fsdp")]
struct Model {
    #[shard(unit, prefetch = "2")]
    field: Linear,
}

fn main() {}
