//! The numbers of the worked answers.

use fsdp_core::{
    Accumulate, ComputePrecision, Device, Job, MemoryModel, ModelShape, ShardLayout, SimOptions, Stage, StepTraffic,
    TrafficModel, Transformer, UnitTraffic, human_bytes, min_ranks, simulate,
};

use crate::output::assert_numbers;
use crate::planned::{bf16, h100_flops, half_job, link, memory, run, sent_len};

fn state(num_parameters: u64, num_ranks: u64, precision: ComputePrecision) -> [u64; 4] {
    let model = |stage| MemoryModel { precision, ..memory(stage, num_parameters, 40, num_ranks) };
    Stage::ALL.map(|stage| model(stage).average().state_bytes())
}

fn memory_numbers() -> Vec<(&'static str, Vec<String>)> {
    let thirteen = state(13_000_000_000, 16, ComputePrecision::F32);
    let mixed = state(13_000_000_000, 16, ComputePrecision::Mixed16);
    assert_eq!(thirteen[3], mixed[3], "16 bytes either way");
    let state_70 = 16 * 70_000_000_000;
    let usable = Device::find("H100").unwrap().memory_bytes - 25_000_000_000;
    let unit = |num_units: u64| 4 * 7_000_000_000_u64 / num_units;
    let gathered = |prefetch| {
        let model = MemoryModel { prefetch, ..memory(Stage::Parameters, 7_000_000_000, 32, 8) };
        human_bytes(model.average().gathered_bytes)
    };
    vec![
        ("1. State by stage", thirteen.map(human_bytes).to_vec()),
        (
            "2. Half precision, same state",
            vec![human_bytes(mixed[0]), human_bytes(mixed[1]), human_bytes(thirteen[1]), human_bytes(mixed[3])],
        ),
        (
            "3. The least number of ranks",
            vec![
                fsdp_core::grouped(state_70 / 1_000_000_000),
                (usable / 1_000_000_000).to_string(),
                min_ranks(state_70, usable).unwrap().to_string(),
            ],
        ),
        ("4. What prefetching holds", vec![human_bytes(unit(32)), gathered(0), gathered(1), gathered(3)]),
    ]
}

fn layout_numbers() -> Vec<(&'static str, Vec<String>)> {
    let rows = |rows, ranks, rank| {
        let held = ShardLayout::new(&[rows, 8], 0, ranks).rows(rank);
        held.len().to_string()
    };
    vec![(
        "5. Who owns which rows",
        vec![rows(10, 4, 0), rows(10, 4, 3), rows(5, 4, 2), rows(5, 4, 3), rows(4096, 12, 0), rows(4096, 12, 11)],
    )]
}

fn traffic_numbers() -> Vec<(&'static str, Vec<String>)> {
    let unit = UnitTraffic::even(8000, 8);
    let sent = |stage, units: &[UnitTraffic]| TrafficModel::new(stage, 8).step(units).sent_len;
    let twelve = [unit; 12];
    let mut kept = twelve;
    kept[11] = unit.keep();
    let batches = |accumulate| {
        let model = TrafficModel { accumulate, num_micro_batches: 8, ..TrafficModel::new(Stage::Parameters, 8) };
        model.step(&twelve).sent_len as f64 / (12.0 * 7000.0)
    };
    let local = MemoryModel { accumulate: Accumulate::Local, ..memory(Stage::Parameters, 7_000_000_000, 32, 8) };
    let reduced = memory(Stage::Parameters, 7_000_000_000, 32, 8);
    let hybrid = |replicas: u64, shards: u64| {
        let model = TrafficModel { num_replicas: replicas, ..TrafficModel::new(Stage::Parameters, shards) };
        let unit = UnitTraffic::even(64_000, shards);
        model.step(&[unit; 10]).sent_len as f64 / 640_000.0
    };
    let state = |shards| human_bytes(memory(Stage::Parameters, 7_000_000_000, 32, shards).average().state_bytes());
    vec![
        (
            "6. Count the passes",
            vec![
                fsdp_core::grouped(sent(Stage::Ddp, &twelve)),
                fsdp_core::grouped(sent(Stage::Parameters, &twelve)),
                format!("{:.3}", sent(Stage::Parameters, &twelve) as f64 / sent(Stage::Ddp, &twelve) as f64),
                fsdp_core::grouped(sent(Stage::Parameters, &kept)),
                format!("{:.3}", sent(Stage::Parameters, &kept) as f64 / sent(Stage::Ddp, &kept) as f64),
            ],
        ),
        (
            "7. Accumulation",
            vec![
                format!("{:.1}", batches(Accumulate::Reduced)),
                format!("{:.1}", batches(Accumulate::Local)),
                human_bytes(reduced.average().gradient_bytes),
                human_bytes(local.average().gradient_bytes),
            ],
        ),
        (
            "8. A mesh of 8 by 8",
            vec![state(64), state(8), format!("{:.2}", hybrid(1, 64)), format!("{:.2}", hybrid(8, 8))],
        ),
    ]
}

fn time_numbers() -> Vec<(&'static str, Vec<String>)> {
    let (nvlink, ndr) = (link("nvlink4"), link("ib-ndr"));
    let even = |link: fsdp_core::Link| link.alpha_s / link.beta_s_per_byte / 1e6;
    let gather_s =
        |link: fsdp_core::Link, ranks: u64, bytes: u64| link.time_s(&StepTraffic::all_gather(ranks, bytes / ranks), 1);
    let megabytes = 400_000_000;
    // A unit of p parameters: 2p FLOP for a token in forward, 2p bytes to gather.
    let tokens = |link: fsdp_core::Link| h100_flops(ComputePrecision::Mixed16) * link.beta_s_per_byte;
    let straggler = |stragglers| {
        let job = half_job(ModelShape::even(7_000_000_000, 32), 64, "ib-ndr");
        let options = SimOptions { stragglers, ..SimOptions::default() };
        1e3 * simulate(&job.workload(Stage::Parameters), &options).step_s
    };
    let (alone, slow) = (straggler(Vec::new()), straggler(vec![(3, 1.5)]));
    vec![
        (
            "9. Latency or bandwidth",
            vec![
                format!("{:.2} MB", even(nvlink)),
                format!("{:.2} MB", even(ndr)),
                format!("{:.2} ms", 1e3 * gather_s(ndr, 8, megabytes)),
                format!("{:.2} ms", 1e3 * gather_s(ndr, 1024, megabytes)),
                format!("{:.0}%", 100.0 * 1023.0 * ndr.alpha_s / gather_s(ndr, 1024, megabytes)),
            ],
        ),
        (
            "10. Enough tokens to hide a gather",
            vec![
                format!("{:.0}", tokens(nvlink)),
                format!("{:.0}", tokens(ndr)),
                format!("{:.0}", tokens(link("eth-25g"))),
            ],
        ),
        ("11. One slow rank", vec![format!("{alone:.0} ms"), format!("{slow:.0} ms"), format!("{:.2}", slow / alone)]),
    ]
}

fn number_numbers() -> Vec<(&'static str, Vec<String>)> {
    let sums = [9.0_f64, 16.0, 144.0];
    let norm = sums.iter().sum::<f64>().sqrt();
    let least = (1..1_000_000).map(|at| at as f32 * 1e-6).find(|step| bf16(1.0 + step) != 1.0).unwrap();
    let stays = (1..1_000_000).map(|at| at as f32 * 1e-6).find(|step| bf16(100.0 + 100.0 * step) != 100.0).unwrap();
    vec![
        (
            "12. Clip by the global norm",
            vec![format!("{norm}"), format!("{:.4}", 1.0 / norm), format!("{}", sums[0].sqrt())],
        ),
        ("13. The smallest step of a bfloat16 weight", vec![format!("{least:.4}"), format!("{:.2}", 100.0 * stays)]),
    ]
}

fn whole_numbers() -> Vec<(&'static str, Vec<String>)> {
    let seven = 7_000_000_000_u64;
    let (weights, moments) = (4 * seven, 8 * seven);
    let model = Transformer { layers: 24, width: 1024, heads: 16, sequence: 2048, vocabulary: 50257, recompute: false };
    let recomputed = Transformer { recompute: true, ..model };
    let precision = ComputePrecision::Mixed16;
    let usable = Device::find("H100").unwrap().memory_bytes;
    let largest = |model: Transformer| {
        let fits = |batch: &usize| {
            let job = half_job(model.shape(), 8, "ib-ndr");
            let job = Job { activation_bytes: Some(model.activation_bytes(*batch, precision)), ..job };
            job.memory(Stage::Parameters).peak_or_known_bytes() <= usable
        };
        (1..1000).take_while(fits).last().unwrap()
    };
    let (kept, again) = (largest(model), largest(recomputed));
    let step = |recompute| {
        let job = half_job(model.shape(), 8, "ib-ndr");
        let job = Job { num_tokens: 2048 * 8, recompute, ..job };
        1e3 * run(&job, Stage::Parameters).compute_s
    };
    let per_rank = (weights + moments) / 8;
    vec![
        (
            "14. The size of a checkpoint",
            vec![
                format!("{} GB", (weights + moments) / 1_000_000_000),
                format!("{:.1} GB", per_rank as f64 / 1e9),
                format!("{:.2} s", per_rank as f64 / 2e9),
            ],
        ),
        (
            "15. The largest batch",
            vec![kept.to_string(), again.to_string(), format!("{:.2}", step(true) / step(false))],
        ),
    ]
}

#[test]
fn the_worked_answers_are_computed() {
    assert_eq!(sent_len(Stage::Ddp, 8000, 12, 8), 2 * 12 * 7000);
    let numbers =
        [memory_numbers(), layout_numbers(), traffic_numbers(), time_numbers(), number_numbers(), whole_numbers()];
    assert_numbers("src/guides/exercises.md", &numbers.concat());
}
