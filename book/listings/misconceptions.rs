//! The numbers of the chapter on misconceptions that need no training run: from the cost, memory and layout models that tests
//! hold against what engines send and hold.

use fsdp_core::{
    Accumulate, Axis, ComputePrecision, Device, Mesh, ModelShape, PrefetchDepth, ShardLayout, Stage, StepTraffic,
    TrafficModel, Transformer, UnitTraffic, human_bytes,
};

use crate::output::{assert_numbers, assert_shown};
use crate::planned::{bf16, half_job, memory, run, sent_len};

const SEVEN_BILLION: u64 = 7_000_000_000;

fn traffic() -> [(&'static str, Vec<String>); 2] {
    let passes = |traffic: StepTraffic, len: u64| traffic.sent_len as f64 / len as f64;
    let (all_reduce, gather) = (StepTraffic::all_reduce(8, 800), StepTraffic::all_gather(8, 100));
    let ratio = |num_units| {
        sent_len(Stage::Parameters, 8000, num_units, 8) as f64 / sent_len(Stage::Ddp, 8000, num_units, 8) as f64
    };
    let sent = Stage::ALL.map(|stage| fsdp_core::grouped(sent_len(stage, 8000, 12, 8)));
    assert_eq!((&sent[0], &sent[0]), (&sent[1], &sent[2]));
    [
        (
            "FSDP sends three times what DDP sends",
            vec![
                format!("{:.2}", passes(all_reduce, 800)),
                format!("{:.3}", passes(gather, 800)),
                format!("{:.2}", ratio(12)),
                format!("{:.3}", ratio(100)),
            ],
        ),
        ("ZeRO-1 and ZeRO-2 send less, since they shard", sent[..3].to_vec()),
    ]
}

fn rows() -> String {
    let mut text = String::from("rows    ranks  rank 0   rank 1   rank 2   rank 3\n");
    for (rows, ranks) in [(12, 4), (10, 4), (5, 4), (2, 4)] {
        let layout = ShardLayout::new(&[rows], 0, ranks);
        let held = (0..ranks).map(|rank| match layout.rows(rank) {
            rows if rows.is_empty() => "none".to_owned(),
            rows if rows.len() == 1 => format!("{}", rows.start),
            rows => format!("{} to {}", rows.start, rows.end - 1),
        });
        let held: String = held.map(|held| format!("{held:<9}")).collect();
        text += &format!("{rows:<8}{ranks:<7}{}\n", held.trim_end());
    }
    text
}

/// Step times of a transformer of 1.5 billion parameters, in milliseconds.
fn speed() -> (String, Vec<String>) {
    let model = Transformer { layers: 48, width: 1600, heads: 25, sequence: 1024, vocabulary: 50257, recompute: true };
    let settings = [
        ("8 H100, NVLink, 16 sequences each", 8, 16, "ib-ndr"),
        ("64 H100, 400 Gbit/s, 16 sequences", 64, 16, "ib-ndr"),
        ("64 H100, 25 Gbit/s, 16 sequences", 64, 16, "eth-25g"),
    ];
    let mut text = format!("{:<38}{:>9}{:>9}{:>9}{:>9}\n", "ms for a step", "stage 0", "stage 1", "stage 2", "stage 3");
    let mut ratios = Vec::new();
    for (name, num_ranks, batch, between) in settings {
        let job = half_job(model.shape(), num_ranks, between);
        let job = fsdp_core::Job { num_tokens: 1024 * batch, recompute: true, ..job };
        let steps = Stage::ALL.map(|stage| 1e3 * run(&job, stage).step_s);
        assert!(
            steps[3] < steps[0].min(steps[1]).min(steps[2]),
            "the page says that stage 3 is the fastest: {steps:?}"
        );
        ratios.push(format!("{:.2}", steps[3] / steps[0]));
        text += &format!("{name:<38}{}\n", steps.map(|step| format!("{step:>9.1}")).concat());
    }
    let job = half_job(model.shape(), 64, "eth-25g");
    let job = fsdp_core::Job { num_tokens: 1024, recompute: true, ..job };
    let (ddp, fsdp) = (run(&job, Stage::Ddp), run(&job, Stage::Parameters));
    assert!(ddp.communication_s > ddp.compute_s, "the page says that communication dominates");
    ratios
        .extend([ddp.compute_s, ddp.communication_s, fsdp.communication_s].map(|time| format!("{:.0} ms", 1e3 * time)));
    (text, ratios)
}

fn activations() -> Vec<String> {
    let model = Transformer { layers: 24, width: 1024, heads: 16, sequence: 2048, vocabulary: 50257, recompute: false };
    let of = |model: Transformer, batch| model.activation_bytes(batch, ComputePrecision::Mixed16);
    let forecast = |num_ranks, stage| {
        let job = half_job(model.shape(), num_ranks, "ib-ndr");
        let job = fsdp_core::Job { activation_bytes: Some(of(model, 4)), ..job };
        job.memory(stage)
    };
    let held = |num_ranks, stage| human_bytes(forecast(num_ranks, stage).activation_bytes.unwrap());
    let state = |num_ranks, stage| human_bytes(forecast(num_ranks, stage).state_bytes());
    vec![
        state(8, Stage::Ddp),
        state(64, Stage::Parameters),
        held(8, Stage::Ddp),
        held(64, Stage::Parameters),
        human_bytes(of(Transformer { recompute: true, ..model }, 4)),
        human_bytes(of(model, 2)),
    ]
}

fn ranks() -> (String, Vec<String>) {
    let mut text = format!("{:<8}{:>12}{:>12}{:>16}{:>12}\n", "ranks", "state", "gathered", "being reduced", "peak");
    let of = |num_ranks| memory(Stage::Parameters, SEVEN_BILLION, 32, num_ranks).average();
    for num_ranks in [8, 64, 512, 4096] {
        let held = of(num_ranks);
        text += &format!(
            "{num_ranks:<8}{:>12}{:>12}{:>16}{:>12}\n",
            human_bytes(held.state_bytes()),
            human_bytes(held.gathered_bytes),
            human_bytes(held.in_flight_bytes),
            human_bytes(held.peak_or_known_bytes())
        );
    }
    (text, vec![human_bytes(of(512).peak_or_known_bytes()), human_bytes(of(4096).peak_or_known_bytes())])
}

fn accumulation() -> (String, Vec<String>) {
    let units = [UnitTraffic::even(8000, 8); 12];
    let passes = |stage, accumulate, num_micro_batches| {
        let model = TrafficModel { accumulate, num_micro_batches, ..TrafficModel::new(stage, 8) };
        model.step(&units).sent_len as f64 / (12.0 * 7000.0)
    };
    let mut text = format!("{:<22}{:>10}{:>10}{:>10}\n", "passes over P, with", "1 batch", "4", "16");
    let settings = [
        ("stage 0, reduced", Stage::Ddp, Accumulate::Reduced),
        ("stage 0, local", Stage::Ddp, Accumulate::Local),
        ("stage 2, reduced", Stage::Gradients, Accumulate::Reduced),
        ("stage 2, local", Stage::Gradients, Accumulate::Local),
        ("stage 3, reduced", Stage::Parameters, Accumulate::Reduced),
        ("stage 3, local", Stage::Parameters, Accumulate::Local),
    ];
    for (name, stage, accumulate) in settings {
        let row = [1, 4, 16].map(|batches| format!("{:>10.1}", passes(stage, accumulate, batches))).concat();
        text += &format!("{name:<22}{row}\n");
    }
    let gradients = |accumulate| {
        let model = fsdp_core::MemoryModel { accumulate, ..memory(Stage::Parameters, SEVEN_BILLION, 32, 64) };
        human_bytes(model.average().gradient_bytes)
    };
    (text, vec![gradients(Accumulate::Reduced), gradients(Accumulate::Local)])
}

/// A weight, and Adam's second moment, in float32 and in bfloat16, over 1000 steps.
fn half_state() -> (String, Vec<String>) {
    let (mut weight, mut weight_16) = (1.0_f32, 1.0_f32);
    let (mut moment, mut moment_16) = (1.0_f32, 1.0_f32);
    let mut text = format!("{:<8}{:>16}{:>16}{:>16}{:>16}\n", "step", "weight, f32", "bf16", "moment, f32", "bf16");
    for step in 0..=1000 {
        if [0, 1, 10, 100, 1000].contains(&step) {
            text += &format!("{step:<8}{weight:>16.4}{weight_16:>16.4}{moment:>16.4}{moment_16:>16.4}\n");
        }
        (weight, weight_16) = (weight - 1e-3, bf16(weight_16 - 1e-3));
        // The gradients have become 0, so that the moment should decay.
        (moment, moment_16) = (0.999 * moment, bf16(0.999 * moment_16));
    }
    let above_1 = f32::from_bits(1.0_f32.to_bits() + (1 << 16));
    let moves = (1..1_000_000).map(|micro| micro as f32 * 1e-6).find(|step| bf16(1.0 + step) != 1.0).unwrap();
    (text, vec![format!("{above_1}"), format!("{moves:.4}")])
}

fn clipping() -> Vec<String> {
    let blocks = [[3.0_f64, 4.0], [0.0, 12.0]];
    let norm = |values: &[f64]| values.iter().map(|value| value * value).sum::<f64>().sqrt();
    let own = blocks.map(|block| norm(&block));
    let global = norm(&own);
    let right: Vec<f64> = blocks.iter().flatten().map(|value| value / global).collect();
    let wrong: Vec<f64> = blocks.iter().zip(own).flat_map(|(block, own)| block.map(|value| value / own)).collect();
    let dot: f64 = right.iter().zip(&wrong).map(|(right, wrong)| right * wrong).sum();
    let angle = (dot / norm(&right) / norm(&wrong)).acos().to_degrees();
    vec![
        format!("{}", own[0]),
        format!("{}", own[1]),
        format!("{global}"),
        format!("{:.2}", norm(&wrong)),
        format!("{angle:.0}°"),
    ]
}

fn unequal() -> Vec<String> {
    let ranks = [(8.0, 1.0), (8.0, 1.0), (2.0, 4.0)];
    let mean_of_means = ranks.iter().map(|(_, mean)| mean).sum::<f64>() / 3.0;
    let items: f64 = ranks.iter().map(|(items, _)| items).sum();
    let mean = ranks.iter().map(|(items, mean)| items * mean).sum::<f64>() / items;
    vec![format!("{mean_of_means:.2}"), format!("{mean:.2}")]
}

fn hybrid() -> (String, Vec<String>) {
    let full_mesh = Mesh::one_dim(16);
    let hybrid_mesh = Mesh::new([(Axis::Replicate, 2), (Axis::Shard, 8)]).unwrap();
    let units = [UnitTraffic::even(160_000, 16); 32];
    let num_parameters = 160_000.0 * 32.0;
    let full = TrafficModel::new(Stage::Parameters, 16).step(&units);
    let units = [UnitTraffic::even(160_000, 8); 32];
    let hybrid = TrafficModel { num_replicas: 2, ..TrafficModel::new(Stage::Parameters, 8) }.step(&units);
    let between = hybrid.sent_len - TrafficModel::new(Stage::Parameters, 8).step(&units).sent_len;
    let passes = |len: u64| format!("{:.2}", len as f64 / num_parameters);
    let mut text =
        format!("{:<34}{:>12}{:>14}{:>14}\n", "7 billion, bf16, 2 nodes of 8", "state", "25 Gbit/s", "400 Gbit/s");
    for (name, mesh) in [("{ shard = 16 }", full_mesh), ("{ replicate = 2, shard = 8 }", hybrid_mesh)] {
        let job = |link| fsdp_core::Job {
            mesh: mesh.clone(),
            ..half_job(ModelShape::even(SEVEN_BILLION as usize, 32), 16, link)
        };
        let step = |link| format!("{:.2} s", run(&job(link), Stage::Parameters).step_s);
        let state = human_bytes(job("ib-ndr").memory(Stage::Parameters).state_bytes());
        text += &format!("{name:<34}{state:>12}{:>14}{:>14}\n", step("eth-25g"), step("ib-ndr"));
    }
    // What leaves a node: in a ring one neighbour in it does; over replicas each of the 8 ranks does.
    let numbers = vec![passes(full.sent_len), passes(hybrid.sent_len), passes(full.sent_len), passes(8 * between)];
    (text, numbers)
}

fn overlap() -> (String, Vec<String>) {
    let mut text = format!("{:<10}{:>12}{:>16}{:>10}\n", "prefetch", "step", "stands still", "hidden");
    let mut hidden = Vec::new();
    for depth in [0, 1, 2, 8] {
        let job = half_job(ModelShape::even(SEVEN_BILLION as usize, 32), 64, "ib-ndr");
        let job = fsdp_core::Job { depth: PrefetchDepth { forward: depth, backward: depth, max_bytes: None }, ..job };
        let report = run(&job, Stage::Parameters);
        let share = 100.0 * report.overlap().unwrap();
        hidden.push(format!("{share:.0}%"));
        text += &format!(
            "{depth:<10}{:>9.1} ms{:>13.1} ms{:>10}\n",
            1e3 * report.step_s,
            1e3 * report.exposed_s,
            format!("{share:.1}%")
        );
    }
    (text, hidden)
}

fn unit_sizes() -> String {
    let mut text = format!("{:<8}{:>12}{:>14}{:>12}{:>16}\n", "units", "step", "stands still", "messages", "gathered");
    for num_units in [1, 4, 16, 64, 256, 1024] {
        let job = half_job(ModelShape::even(1_000_000_000, num_units), 64, "eth-100g");
        let job = fsdp_core::Job { num_tokens: 8192, ..job };
        let report = run(&job, Stage::Parameters);
        let held = job.memory(Stage::Parameters).gathered_bytes;
        text += &format!(
            "{num_units:<8}{:>9.1} ms{:>11.1} ms{:>12}{:>16}\n",
            1e3 * report.step_s,
            1e3 * report.exposed_s,
            fsdp_core::grouped(report.traffic.num_messages),
            human_bytes(held)
        );
    }
    text
}

fn padding() -> Vec<String> {
    let layout = ShardLayout::new(&[5, 3], 0, 4);
    let held: usize = (0..4).map(|rank| layout.shard_len(rank)).sum();
    vec![held.to_string(), (4 * layout.padded_len()).to_string()]
}

#[test]
fn the_numbers_of_the_misconceptions_are_computed() {
    let (speed, ratios) = speed();
    let (by_ranks, floor) = ranks();
    let (accumulation, gradients) = accumulation();
    let (half, half_numbers) = half_state();
    let (hybrid, hybrid_numbers) = hybrid();
    let (overlap, hidden) = overlap();
    let one = |stage| human_bytes(memory(stage, SEVEN_BILLION, 32, 1).average().state_bytes());
    assert_eq!(one(Stage::Ddp), one(Stage::Parameters));
    for (file, text) in [
        ("rows.txt", rows()),
        ("stage-speed.txt", speed),
        ("more-ranks.txt", by_ranks),
        ("accumulation.txt", accumulation),
        ("half-state.txt", half),
        ("hybrid.txt", hybrid),
        ("overlap.txt", overlap),
        ("unit-sizes.txt", unit_sizes()),
    ] {
        assert_shown(&format!("listings/output/guides/{file}"), &text);
    }
    let device = human_bytes(Device::find("H100").unwrap().memory_bytes);
    let mut numbers = traffic().to_vec();
    numbers.extend([
        ("ZeRO-3 is always slower", ratios),
        ("Sharding shrinks activations", activations()),
        ("Twice the ranks, half the memory", [floor, vec![device]].concat()),
        ("FSDP on one device saves memory", vec![one(Stage::Ddp), one(Stage::Parameters)]),
        ("Gradient accumulation saves communication", gradients),
        ("The optimizer's state can be bfloat16", half_numbers),
        ("Each rank can clip its own block", clipping()),
        ("The mean of the ranks' losses is the mean over the samples", unequal()),
        ("Hybrid sharding sends fewer bytes", hybrid_numbers),
        ("Overlap hides all communication", hidden),
        ("Uneven shards are padded, and padding is stored", padding()),
    ]);
    assert_numbers("src/guides/misconceptions.md", &numbers);
}
