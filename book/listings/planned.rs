//! What the chapters with numbers share: machines of the tables of hardware, and how numbers are written.

use fsdp_core::{
    ComputePrecision, Device, Job, Link, Machine, MemoryModel, ModelShape, NamedLink, Network, SimOptions, SimReport,
    Speed, Stage, TrafficModel, UnitTraffic, simulate,
};

/// The share of a device's arithmetic that is reached: an assumption, as in `fsdp plan`.
pub(crate) const REACHED: f64 = 0.4;

pub(crate) fn link(name: &str) -> Link {
    NamedLink::find(name).unwrap().link
}

/// Operations per second that an H100 reaches.
pub(crate) fn h100_flops(precision: ComputePrecision) -> f64 {
    let device = Device::find("H100").unwrap();
    REACHED * if precision == ComputePrecision::F32 { device.flops_32 } else { device.flops_16 }
}

/// Nodes of 8 H100 with NVLink inside, and `between` from node to node.
pub(crate) fn h100(precision: ComputePrecision, between: &str) -> Machine {
    let network = Network { in_node: link("nvlink4"), between: link(between), ranks_per_node: 8 };
    let memory_bytes_per_s = Device::find("H100").unwrap().memory_bytes_per_s;
    Machine { network: network.into(), speed: Speed::Rate { flops_per_s: h100_flops(precision), memory_bytes_per_s } }
}

/// A job in half precision on H100s, without a look at the gradients' norm.
pub(crate) fn half_job(shape: ModelShape, num_ranks: usize, between: &str) -> Job {
    let precision = ComputePrecision::Mixed16;
    let job = Job::new(shape, num_ranks, h100(precision, between));
    Job { precision, reduce_bytes: 2, needs_norm: false, ..job }
}

pub(crate) fn run(job: &Job, stage: Stage) -> SimReport {
    simulate(&job.workload(stage), &SimOptions::default())
}

/// Memory of a rank, `num_parameters` in `num_units` equal units on `num_ranks`, in float32 with Adam, prefetch 1.
pub(crate) fn memory(stage: Stage, num_parameters: u64, num_units: u64, num_ranks: u64) -> MemoryModel {
    MemoryModel {
        stage,
        num_shards: num_ranks,
        largest_unit_len: num_parameters / num_units,
        prefetch: 1,
        ..MemoryModel::new(num_parameters)
    }
}

/// Elements that a rank sends in a step of `num_units` units of `unit_len` elements.
pub(crate) fn sent_len(stage: Stage, unit_len: u64, num_units: usize, num_ranks: u64) -> u64 {
    TrafficModel::new(stage, num_ranks).step(&vec![UnitTraffic::even(unit_len, num_ranks); num_units]).sent_len
}

/// The nearest bfloat16, ties to even: what storing in it does to a finite number.
pub(crate) fn bf16(value: f32) -> f32 {
    let bits = value.to_bits();
    let tie = (bits >> 16) & 1;
    f32::from_bits(bits.wrapping_add(0x7fff + tie) & 0xffff_0000)
}
