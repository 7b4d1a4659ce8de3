//! A word of a field on the type.

#[path = "../../fsdp/mod.rs"]
mod fsdp;

use fsdp_macros::Sharded;

struct Linear;

#[derive(Sharded)]
#[shard(crate = "fsdp", unit)]
struct Model {
    field: Linear,
}

fn main() {}
