//! A crate path that is no path.

use fsdp_macros::Sharded;

struct Linear;

#[derive(Sharded)]
#[shard(crate = "not a path")]
struct Model {
    field: Linear,
}

fn main() {}
