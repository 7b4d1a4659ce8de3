//! Chapter 7: ranks as a grid, which rows they own, and what hybrid sharding changes.

use fsdp_burn::{Axis, Config, Error, Mesh, Rank, Stage, launch};
use fsdp_core::PartitionSpec;

use crate::Outcome;
use crate::show::grouped;
use crate::train::{config, train};

/// Bytes of parameters, and those sent in a step by all-gathers, reduce-scatters and all-reduces.
fn by_kind(rank: &Rank) -> Result<(usize, [u64; 3]), Error> {
    let seen = train(rank)?;
    Ok((seen.parameters, seen.sent_by_kind))
}

pub(crate) fn run() -> Outcome {
    // ANCHOR: mesh
    let mesh = Mesh::new([(Axis::Replicate, 2), (Axis::Shard, 3)])?;
    for rank in 0..mesh.world_size() {
        let [replica, shard] = [Axis::Replicate, Axis::Shard].map(|axis| mesh.coordinate(axis, rank));
        let [twins, peers] = [Axis::Replicate, Axis::Shard].map(|axis| mesh.group(axis, rank));
        println!("rank {rank}: copy {replica}, block {shard}; gathers with {peers:?}, averages with {twins:?}");
    }
    // ANCHOR_END: mesh

    println!("\nA weight of [10, 6] on this mesh, as [rows, columns] of each rank\n");
    // ANCHOR: spec
    for axes in [vec![Some("shard")], vec![None, Some("shard")]] {
        let spec = PartitionSpec::parse(axes);
        let layout = spec.resolve("head.weight", &[10, 6], &mesh)?;
        let (name, dim) = (spec.to_string(), layout.dim());
        for rank in 0..mesh.world_size() {
            let block = mesh.coordinate(Axis::Shard, rank);
            let (rows, shape) = (format!("{:?}", layout.rows(block)), layout.shard_shape(block));
            println!("{name:<15} rank {rank}: {rows:<5} of dimension {dim}, shape {shape:?}");
        }
    }
    // ANCHOR_END: spec

    println!("\nFour ranks at stage 3; bytes of rank 0\n");
    println!(
        "{:>26} {:>11} {:>14} {:>12} {:>14} {:>12}",
        "mesh", "parameters", "sent in a step", "all-gathers", "reduce-scatter", "all-reduce"
    );
    for (replicate, shard) in [(1, 4), (2, 2), (4, 1)] {
        // ANCHOR: hybrid
        let mesh = Mesh::new([(Axis::Replicate, replicate), (Axis::Shard, shard)])?;
        let config = Config { mesh: Some(mesh), ..config(Stage::Parameters, 4) };
        let rows = launch(&config, |rank| by_kind(&rank))?;
        // ANCHOR_END: hybrid
        let (parameters, kinds) = rows[0];
        let [gathers, scatters, reduces] = kinds.map(grouped);
        println!(
            "{:>26} {:>11} {:>14} {gathers:>12} {scatters:>14} {reduces:>12}",
            format!("replicate {replicate}, shard {shard}"),
            grouped(parameters),
            grouped(kinds.iter().sum::<u64>()),
        );
    }
    Ok(())
}
