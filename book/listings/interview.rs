//! The numbers in the answers to interview questions.

use fsdp_core::{
    Action, ComputePrecision, Device, Link, MemoryModel, PrefetchDepth, Program, Stage, StepRules, StepTraffic,
    TrafficModel, UnitTraffic, UnitTraits, Uses, human_bytes,
};

use crate::output::{assert_numbers, assert_shown};
use crate::planned::{h100_flops, link, memory, sent_len};
use crate::svg::{Anchor, Svg};

/// Messages of a binomial tree from one rank to all, one after the other on its longest way.
fn tree_hops(num_ranks: u64) -> u64 {
    u64::from(num_ranks.next_power_of_two().trailing_zeros())
}

fn ring_s(link: Link, num_ranks: u64, bytes: u64) -> f64 {
    link.time_s(&StepTraffic::all_reduce(num_ranks, bytes), 1)
}

/// A reduction to one rank and a broadcast from it, each a tree that passes the whole.
fn tree_s(link: Link, num_ranks: u64, bytes: u64) -> f64 {
    2.0 * tree_hops(num_ranks) as f64 * link.message_s(bytes)
}

/// The size, in bytes, from which the ring is faster.
fn crossing(link: Link, num_ranks: u64) -> u64 {
    let (mut tree, mut ring) = (1, 1 << 40);
    while ring - tree > 1 {
        let middle = u64::midpoint(tree, ring);
        if ring_s(link, num_ranks, middle) < tree_s(link, num_ranks, middle) { ring = middle } else { tree = middle }
    }
    ring
}

/// Times of an all-reduce by size, both on logarithmic scales: from 1 kB to 1 GB, and from 10 µs to 1 s.
#[test]
fn the_picture_of_ring_and_tree_is_the_cost_models() {
    let link = link("ib-ndr");
    let at = |bytes: f64, seconds: f64| [70.0 + 95.0 * (bytes / 1e3).log10(), 290.0 - 54.0 * (seconds / 1e-5).log10()];
    let mut picture =
        Svg::new(760.0, 340.0, "Time of an all-reduce by size, as a ring and as a tree, on 8 and 1024 ranks");
    for (decade, label) in ["1 kB", "10 kB", "100 kB", "1 MB", "10 MB", "100 MB", "1 GB"].into_iter().enumerate() {
        let bytes = 1e3 * 10_f64.powi(decade as i32);
        picture.line(at(bytes, 1e-5), at(bytes, 1.0), "fig-grid");
        let [x, y] = at(bytes, 1e-5);
        picture.text([x, y + 18.0], Anchor::Middle, "fig-small", label);
    }
    for (decade, label) in ["10 µs", "100 µs", "1 ms", "10 ms", "100 ms", "1 s"].into_iter().enumerate() {
        let seconds = 1e-5 * 10_f64.powi(decade as i32);
        picture.line(at(1e3, seconds), at(1e9, seconds), "fig-grid");
        let [x, y] = at(1e3, seconds);
        picture.text([x - 8.0, y + 4.0], Anchor::End, "fig-small", label);
    }
    for (num_ranks, class) in [(8, "fig-curve0"), (1024, "fig-curve1")] {
        let sizes = (0..=60).map(|tenth| 1e3 * 10_f64.powf(f64::from(tenth) / 10.0));
        let curve = |time: fn(Link, u64, u64) -> f64| {
            sizes.clone().map(|bytes| at(bytes, time(link, num_ranks, bytes as u64))).collect::<Vec<_>>()
        };
        let (ring, tree) = (curve(ring_s), curve(tree_s));
        for (name, [_, y]) in [("ring", ring[60]), ("tree", tree[60])] {
            let label = format!("{name}, {num_ranks}");
            picture.text([650.0, y + 4.0], Anchor::Start, "fig-small", &label);
        }
        picture.curve(&ring, class);
        picture.curve(&tree, &format!("{class} fig-dashed"));
    }
    assert_shown("listings/output/guides/ring-and-tree.svg", &picture.finish());
}

fn passes(num_micro_batches: u64) -> String {
    let model = TrafficModel { num_micro_batches, ..TrafficModel::new(Stage::Parameters, 8) };
    // Kept, so that the last unit's saved gather does not blur the count.
    let unit = UnitTraffic::even(8000, 8);
    let all = model.step(&[unit; 1000]).sent_len as f64 / 7_000_000.0;
    format!("{all:.0}")
}

/// Units gathered at once, in the actions of a step.
fn gathered(depth: usize) -> String {
    let unit = UnitTraits { gathered_on_use: true, trainable: true, gathered_bytes: 1, ..UnitTraits::default() };
    let rules = StepRules {
        stage: Stage::Parameters,
        depth: PrefetchDepth { forward: depth, backward: depth, max_bytes: None },
        num_micro_batches: 1,
        accumulate: fsdp_core::Accumulate::Reduced,
        needs_norm: false,
        reshards: false,
    };
    let program = Program::steady(&rules, &[unit; 12], &Uses::in_order(12));
    let gathers = program.actions().filter(|action| matches!(action, Action::Gather(_))).count();
    assert_eq!(gathers, 23, "twice each, but for the last one");
    program.peak_gathered_bytes(&[unit; 12]).to_string()
}

#[test]
fn the_numbers_of_the_interview_questions_are_computed() {
    let ndr = link("ib-ndr");
    let megabytes = |bytes: u64| format!("{:.1} MB", bytes as f64 / 1e6);
    let seven = |stage, ranks| memory(stage, 7_000_000_000, 32, ranks);
    let mixed = MemoryModel { precision: ComputePrecision::Mixed16, ..seven(Stage::Parameters, 8) };
    let adam_bytes = 12 * 7_000_000_000_u64 / 8;
    let pcie = link("pcie4");
    let half = |precision| h100_flops(precision) / 1e12;
    let peak = |ranks| {
        let device = Device::find("H100").unwrap().memory_bytes;
        seven(Stage::Parameters, ranks).average().peak_or_known_bytes() <= device
    };
    assert!(peak(8));
    let ratio = sent_len(Stage::Parameters, 8000, 100, 8) as f64 / sent_len(Stage::Ddp, 8000, 100, 8) as f64;
    assert_numbers(
        "src/guides/interview.md",
        &[
            (
                "Ring or tree: when is which one faster?",
                vec![megabytes(crossing(ndr, 8)), megabytes(crossing(ndr, 64)), megabytes(crossing(ndr, 1024))],
            ),
            ("Why does FSDP send one and a half times what DDP sends?", vec![format!("{ratio:.3}")]),
            ("Does gradient accumulation change that?", vec![passes(1), passes(4)]),
            ("What is on a device at the worst moment of a step?", vec![gathered(0), gathered(1), gathered(2)]),
            (
                "What does half precision change in memory and traffic?",
                vec![
                    human_bytes(seven(Stage::Parameters, 8).average().state_bytes()),
                    human_bytes(mixed.average().state_bytes()),
                    human_bytes(seven(Stage::Parameters, 8).average().gathered_bytes),
                    human_bytes(mixed.average().gathered_bytes),
                ],
            ),
            (
                "How many tokens hide a gather?",
                vec![
                    format!("{:.0}", half(ComputePrecision::Mixed16)),
                    format!("{:.0}", 1e12 * half(ComputePrecision::Mixed16) * link("nvlink4").beta_s_per_byte),
                    format!("{:.0}", 1e12 * half(ComputePrecision::Mixed16) * ndr.beta_s_per_byte),
                ],
            ),
            (
                "What does offloading the optimizer cost?",
                vec![
                    format!("{:.1} GB", adam_bytes as f64 / 1e9),
                    format!("{:.2} s", 2.0 * adam_bytes as f64 * pcie.beta_s_per_byte),
                ],
            ),
        ],
    );
}
