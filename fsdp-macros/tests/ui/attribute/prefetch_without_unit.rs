//! A setting of a unit where there is no unit: `nested` makes none.

#[path = "../../fsdp/mod.rs"]
mod fsdp;

use fsdp_macros::Sharded;

#[derive(Sharded)]
#[shard(crate = "fsdp")]
struct Inner;

#[derive(Sharded)]
#[shard(crate = "fsdp")]
struct Model {
    #[shard(nested, prefetch = 2)]
    field: Option<Inner>,
}

fn main() {}
