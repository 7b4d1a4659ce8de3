//! A union.

#[path = "../../fsdp/mod.rs"]
mod fsdp;

use fsdp_macros::Sharded;

#[derive(Sharded)]
#[shard(crate = "fsdp")]
union Either {
    left: u32,
    right: f32,
}

fn main() {}
