//! A type whose rules would contain themselves.

#[path = "../../fsdp/mod.rs"]
mod fsdp;

use fsdp_macros::Sharded;

#[derive(Sharded)]
#[shard(crate = "fsdp")]
struct Tree {
    #[shard(units, nested)]
    children: Vec<Tree>,
}

fn main() {}
