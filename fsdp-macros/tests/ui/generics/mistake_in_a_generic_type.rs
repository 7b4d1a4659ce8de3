//! A mistake in a generic type: its impl keeps the bounds of the user.

#[path = "../../fsdp/mod.rs"]
mod fsdp;

use fsdp_macros::Sharded;

#[derive(Sharded)]
#[shard(crate = "fsdp")]
struct Model<'a, T: Clone, const N: usize>
where
    T: 'a,
{
    #[shard(nestd)]
    field: &'a [T; N],
}

fn main() {}
