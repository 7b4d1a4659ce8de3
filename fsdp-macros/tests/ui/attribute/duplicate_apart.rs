//! A word twice, in two attributes.

#[path = "../../fsdp/mod.rs"]
mod fsdp;

use fsdp_macros::Sharded;

struct Linear;

#[derive(Sharded)]
#[shard(crate = "fsdp")]
struct Model {
    #[shard(unit)]
    #[shard(keep, unit)]
    field: Linear,
}

fn main() {}
