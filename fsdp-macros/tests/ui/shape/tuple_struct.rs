//! Fields without names.

#[path = "../../fsdp/mod.rs"]
mod fsdp;

use fsdp_macros::Sharded;

struct Linear;

#[derive(Sharded)]
#[shard(crate = "fsdp")]
struct Pair(#[shard(unit)] Linear, Linear);

fn main() {}
