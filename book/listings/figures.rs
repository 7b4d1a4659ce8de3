//! The figures of the tutorial about sizes: computed, or drawn from an output of a chapter that the book shows.

use fsdp_core::{Axis, Device, MemoryModel, Mesh, PartitionSpec, ShardLayout, Stage};

use crate::output::assert_shown;
use crate::svg::{Anchor, Svg};

/// Kinds of state, with the style of each.
const KINDS: [(&str, &str); 4] = [
    ("fig-parameters", "parameters"),
    ("fig-gradients", "gradients"),
    ("fig-optimizer", "optimizer state"),
    ("fig-gathered", "gathered units"),
];

/// Styles of blocks, by the rank that owns them.
const RANKS: [&str; 4] = ["fig-rank0", "fig-rank1", "fig-rank2", "fig-rank3"];

pub(crate) fn assert_figure(name: &str, svg: Svg) {
    assert_shown(&format!("listings/output/tutorial/{name}.svg"), &svg.finish());
}

/// What a chapter has printed, as the book shows it.
pub(crate) fn printed(name: &str) -> String {
    let path = format!("{}/listings/output/tutorial/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Numbers of a row, without `≈`, commas and units.
pub(crate) fn numbers(line: &str) -> Vec<f64> {
    line.split_whitespace().filter_map(|word| word.trim_matches(['≈', '%']).replace(',', "").parse().ok()).collect()
}

#[test]
fn the_figure_of_the_memory_wall() {
    let [width, height] = [640.0, 330.0];
    let mut svg = Svg::new(width, height, "Bytes of training state by number of parameters, and the memory of devices");
    let [left, right, top, bottom] = [70.0, 470.0, 20.0, 280.0];
    // Powers of ten: parameters from 0.1 to 1000 billion, bytes from 1 GB to 100 TB.
    let x = |billions: f64| left + (billions.log10() + 1.0) / 4.0 * (right - left);
    let y = |giga: f64| bottom - giga.log10() / 5.0 * (bottom - top);
    for power in 0..=5 {
        let giga = 10_f64.powi(power);
        svg.line([left, y(giga)], [right, y(giga)], "fig-grid");
        let label = if power < 3 { format!("{giga:.0} GB") } else { format!("{:.0} TB", giga / 1e3) };
        svg.text([left - 8.0, y(giga) + 4.0], Anchor::End, "fig-small", &label);
    }
    for power in -1..=3 {
        let billions = 10_f64.powi(power);
        svg.line([x(billions), top], [x(billions), bottom], "fig-grid");
        let label = if power < 0 { "100 M".to_owned() } else { format!("{billions:.0} B") };
        svg.text([x(billions), bottom + 18.0], Anchor::Middle, "fig-small", &label);
    }
    svg.text([(left + right) / 2.0, bottom + 38.0], Anchor::Middle, "fig-small", "parameters");
    svg.curve(&[[x(0.1), y(1.6)], [x(1000.0), y(16e3)]], "fig-curve0");
    svg.curve(&[[x(0.25), y(1.0)], [x(1000.0), y(4e3)]], "fig-curve1");
    svg.text([right + 8.0, y(16e3) + 4.0], Anchor::Start, "fig-small", "training: 16 bytes each");
    svg.text([right + 8.0, y(4e3) + 10.0], Anchor::Start, "fig-small", "weights alone: 4 each");
    for device in Device::ALL.iter().filter(|device| device.name != "A100") {
        let giga = device.memory_bytes as f64 / 1e9;
        svg.line([left, y(giga)], [right, y(giga)], "fig-limit");
        svg.dot([x(giga / 16.0), y(giga)], "fig-mark", &format!("{:.1} billion parameters", giga / 16.0));
        let label = format!("{}: {giga:.0} GB, {:.1} B", device.name, giga / 16.0);
        let lift = if device.name == "H200" { -1.0 } else { 9.0 };
        svg.text([right + 8.0, y(giga) + lift], Anchor::Start, "fig-small", &label);
    }
    assert_figure("wall", svg);
}

#[test]
fn the_figure_of_the_copies() {
    let mut svg = Svg::new(640.0, 280.0, "Four ranks, each with all parameters, gradients and optimizer state");
    for (rank, class) in RANKS.iter().enumerate() {
        let x = 30.0 + 150.0 * rank as f64;
        svg.text([x + 60.0, 20.0], Anchor::Middle, "fig-label", &format!("rank {rank}"));
        svg.rect([x, 30.0], [120.0, 26.0], class, "");
        svg.text([x + 60.0, 48.0], Anchor::Middle, "fig-inside", &format!("samples {}-{}", 16 * rank, 16 * rank + 15));
        let mut y = 70.0;
        for ((class, name), bytes) in KINDS.iter().zip([4.0, 4.0, 8.0]) {
            svg.rect([x, y], [120.0, 10.0 * bytes], class, "");
            svg.text(
                [x + 60.0, y + 5.0 * bytes + 4.0],
                Anchor::Middle,
                "fig-inside",
                &format!("{} {bytes}P", name.trim_end_matches(" state")),
            );
            if *name == "gradients" && rank < 3 {
                svg.arrow([x + 122.0, y + 14.0], [x + 148.0, y + 14.0]);
                svg.arrow([x + 148.0, y + 26.0], [x + 122.0, y + 26.0]);
            }
            y += 10.0 * bytes + 3.0;
        }
    }
    svg.text([320.0, 266.0], Anchor::Middle, "fig-small", "other samples; everything else is the same four times");
    assert_figure("copies", svg);
}

#[test]
fn the_figure_of_the_stages_shows_what_was_measured() {
    let text = printed("zero.txt");
    let rows: Vec<Vec<f64>> =
        text.lines().filter(|line| line.contains('≈')).map(numbers).filter(|row| row.len() == 6).collect();
    assert_eq!(rows.len(), 4);
    let mut svg = Svg::new(640.0, 250.0, "Bytes of one rank at stages 0 to 3, by kind");
    let scale = 480.0 / rows[0][1..5].iter().enumerate().map(|(i, v)| if i == 2 { v * 1e6 } else { *v }).sum::<f64>();
    for (index, row) in rows.iter().enumerate() {
        // The optimizer's state is in megabytes, the rest in bytes.
        let bytes = [row[1], row[2], row[3] * 1e6, row[4]];
        let y = 20.0 + 48.0 * index as f64;
        svg.text([10.0, y + 22.0], Anchor::Start, "fig-label", &format!("stage {}", row[0]));
        let mut x = 80.0;
        for ((class, name), bytes) in KINDS.iter().zip(bytes).filter(|(_, bytes)| *bytes > 0.0) {
            svg.rect([x, y], [bytes * scale, 34.0], class, &format!("{name}: {:.1} MB", bytes / 1e6));
            x += bytes * scale;
        }
        let total: f64 = bytes.iter().sum();
        svg.text([x + 8.0, y + 22.0], Anchor::Start, "fig-small", &format!("{:.1} MB", total / 1e6));
    }
    svg.legend([80.0, 235.0], &KINDS);
    assert_figure("zero", svg);
}

/// A tensor of `shape`, each element in the colour of its owner.
fn tensor(svg: &mut Svg, [left, top]: [f64; 2], layout: &ShardLayout, hint: impl Fn(usize) -> String) {
    let columns = layout.shape()[1];
    for rank in 0..layout.num_shards() {
        for element in layout.runs(rank).flatten() {
            let at = [left + 22.0 * (element % columns) as f64, top + 22.0 * (element / columns) as f64];
            svg.rect(at, [20.0, 20.0], RANKS[rank % RANKS.len()], &hint(rank));
        }
    }
}

#[test]
fn the_figure_of_units_and_blocks() {
    let [weight, bias] = [[5, 4], [5, 1]].map(|shape| ShardLayout::new(&shape, 0, 3));
    let mut svg = Svg::new(640.0, 180.0, "Two units of two parameters each, cut by rows over three ranks");
    for unit in 0..2 {
        let left = 160.0 + 220.0 * f64::from(unit);
        svg.text([left + 69.0, 20.0], Anchor::Middle, "fig-label", &format!("unit blocks.{unit}"));
        for (layout, left, name) in [(&weight, left, "weight"), (&bias, left + 116.0, "bias")] {
            let middle = left + 11.0 * layout.shape()[1] as f64 - 1.0;
            svg.text([middle, 44.0], Anchor::Middle, "fig-small", name);
            tensor(&mut svg, [left, 54.0], layout, |rank| format!("rank {rank}"));
        }
    }
    for rank in 0..3 {
        let rows = weight.rows(rank);
        let y = 54.0 + 11.0 * (rows.start + rows.end) as f64 + 3.0;
        let label = format!("rank {rank}: {} {}", rows.len(), if rows.len() == 1 { "row" } else { "rows" });
        svg.text([146.0, y], Anchor::End, "fig-small", &label);
    }
    assert_shown("listings/output/guides/blocks.svg", &svg.finish());
}

#[test]
fn the_figure_of_a_gather() {
    let mut svg = Svg::new(640.0, 190.0, "Three ranks put their blocks into one buffer, and all compute with it");
    for (x, title) in [(70.0, "stored"), (300.0, "gathered unit"), (540.0, "used")] {
        svg.text([x, 20.0], Anchor::Middle, "fig-label", title);
    }
    for (rank, class) in RANKS.iter().take(3).enumerate() {
        let y = 60.0 + 48.0 * rank as f64;
        svg.rect([40.0, y - 16.0], [60.0, 32.0], class, "");
        svg.text([70.0, y + 4.0], Anchor::Middle, "fig-inside", &format!("rank {rank}"));
        svg.arrow([104.0, y], [206.0, 108.0 + 10.0 * (rank as f64 - 1.0)]);
        svg.rect([210.0 + 60.0 * rank as f64, 92.0], [58.0, 32.0], class, "");
        svg.arrow([392.0, 108.0 + 10.0 * (rank as f64 - 1.0)], [470.0, y]);
        svg.node([540.0, y], 136.0, &format!("rank {rank} computes"));
    }
    assert_shown("listings/output/guides/gather.svg", &svg.finish());
}

#[test]
fn the_figure_of_a_reduction() {
    let mut svg = Svg::new(640.0, 190.0, "Three whole gradients become three blocks of their mean");
    svg.text([205.0, 20.0], Anchor::Middle, "fig-label", "whole gradients");
    svg.text([510.0, 20.0], Anchor::Middle, "fig-label", "blocks of the mean");
    for (rank, class) in RANKS.iter().take(3).enumerate() {
        let y = 60.0 + 48.0 * rank as f64;
        svg.text([98.0, y + 4.0], Anchor::End, "fig-small", &format!("rank {rank}"));
        for (block, name) in ["a", "b", "c"].iter().enumerate() {
            let x = 110.0 + 64.0 * block as f64;
            svg.rect([x, y - 16.0], [62.0, 32.0], RANKS[block], "");
            svg.text([x + 31.0, y + 4.0], Anchor::Middle, "fig-inside", &format!("{name}{rank}"));
        }
        svg.arrow([312.0, y], [396.0, y]);
        let name = ["a", "b", "c"][rank];
        svg.rect([400.0, y - 16.0], [220.0, 32.0], class, "");
        svg.text([510.0, y + 4.0], Anchor::Middle, "fig-inside", &format!("(({name}0 + {name}1) + {name}2) / 3"));
    }
    svg.text([354.0, 20.0], Anchor::Middle, "fig-small", "reduce-scatter");
    assert_shown("listings/output/guides/reduction.svg", &svg.finish());
}

#[test]
fn the_figure_of_partition_specs() {
    let mesh = Mesh::new([(Axis::Replicate, 2), (Axis::Shard, 3)]).unwrap();
    let mut svg = Svg::new(640.0, 300.0, "A mesh of two by three ranks, and a weight cut by rows and by columns");
    svg.text([142.0, 20.0], Anchor::Middle, "fig-label", "mesh");
    for rank in 0..mesh.world_size() {
        let [copy, block] = [Axis::Replicate, Axis::Shard].map(|axis| mesh.coordinate(axis, rank));
        let at = [70.0 + 50.0 * block as f64, 60.0 + 50.0 * copy as f64];
        svg.rect(at, [44.0, 44.0], RANKS[block], &format!("rank {rank}: copy {copy}, block {block}"));
        svg.text([at[0] + 22.0, at[1] + 28.0], Anchor::Middle, "fig-inside", &rank.to_string());
    }
    svg.text([142.0, 50.0], Anchor::Middle, "fig-small", "shard");
    for copy in 0..2 {
        svg.text([64.0, 86.0 + 50.0 * f64::from(copy)], Anchor::End, "fig-small", &format!("copy {copy}"));
    }
    for (spec, left) in [(vec![Some("shard")], 270.0), (vec![None, Some("shard")], 470.0)] {
        let spec = PartitionSpec::parse(spec);
        let layout = spec.resolve("head.weight", &[10, 6], &mesh).unwrap();
        svg.text([left + 66.0, 20.0], Anchor::Middle, "fig-label", &spec.to_string());
        let owners = |block: usize| {
            let ranks = (0..mesh.world_size()).filter(|&rank| mesh.coordinate(Axis::Shard, rank) == block);
            format!("ranks {:?}", ranks.collect::<Vec<_>>())
        };
        tensor(&mut svg, [left, 40.0], &layout, owners);
    }
    svg.text([336.0, 285.0], Anchor::Middle, "fig-small", "rows of 4, 4 and 2");
    svg.text([536.0, 285.0], Anchor::Middle, "fig-small", "columns of 2, 2 and 2");
    assert_figure("mesh", svg);
}

#[test]
fn the_figure_of_another_world() {
    let mut svg = Svg::new(640.0, 290.0, "Ten rows written by four ranks and read by three");
    let [of_four, of_three] = [4, 3].map(|num_ranks| ShardLayout::new(&[10, 4], 0, num_ranks));
    for (layout, left, label) in [(&of_four, 150.0, "written by four ranks"), (&of_three, 400.0, "read by three")] {
        svg.text([left + 44.0, 20.0], Anchor::Middle, "fig-label", label);
        tensor(&mut svg, [left, 36.0], layout, |rank| format!("rank {rank}"));
    }
    for rank in 0..3 {
        let rows = of_three.rows(rank);
        for writer in 0..4 {
            let shared = of_four.rows(writer);
            let (from, to) = (rows.start.max(shared.start), rows.end.min(shared.end));
            if from < to {
                let y = 36.0 + 22.0 * (from + to) as f64 / 2.0 - 1.0;
                svg.arrow([246.0, y], [392.0, y]);
                let rows = if to - from == 1 { format!("row {from}") } else { format!("rows {from}-{}", to - 1) };
                let label = format!("{rows} of file {writer}");
                svg.text([319.0, y - 5.0], Anchor::Middle, "fig-small", &label);
            }
        }
    }
    svg.text(
        [320.0, 280.0],
        Anchor::Middle,
        "fig-small",
        "each rank reads the rows that it will own, from whoever wrote them",
    );
    assert_figure("recut", svg);
}

#[test]
fn the_figure_of_element_types() {
    let mut svg = Svg::new(640.0, 150.0, "Bits of float32, bfloat16 and float16");
    for (row, (name, exponent, fraction)) in [("f32", 8, 23), ("bf16", 8, 7), ("f16", 5, 10)].iter().enumerate() {
        let y = 14.0 + 38.0 * row as f64;
        svg.text([50.0, y + 17.0], Anchor::End, "fig-label", name);
        for bit in 0..1 + exponent + fraction {
            let class = match bit {
                0 => "fig-optimizer",
                bit if bit <= *exponent => "fig-gradients",
                _ => "fig-parameters",
            };
            svg.rect([60.0 + 17.0 * f64::from(bit), y], [15.0, 24.0], class, "");
        }
    }
    let meaning =
        [("fig-optimizer", "sign"), ("fig-gradients", "exponent: range"), ("fig-parameters", "fraction: precision")];
    svg.legend([60.0, 142.0], &meaning);
    assert_figure("bits", svg);
}

#[test]
fn the_figure_of_the_number_of_ranks() {
    let [left, right, top, bottom] = [60.0, 500.0, 20.0, 270.0];
    let mut svg = Svg::new(640.0, 320.0, "State of 7 billion parameters by rank, over the number of ranks, by stage");
    let giga = |stage: Stage, num_shards: u64| {
        let model = MemoryModel { stage, num_shards, ..MemoryModel::new(7_000_000_000) };
        model.average().state_bytes() as f64 / 1e9
    };
    let x = |num_ranks: f64| left + num_ranks.log2() / 6.0 * (right - left);
    let y = |giga: f64| bottom - giga / 120.0 * (bottom - top);
    for step in 0..=6 {
        let value = 20.0 * f64::from(step);
        svg.line([left, y(value)], [right, y(value)], "fig-grid");
        svg.text([left - 8.0, y(value) + 4.0], Anchor::End, "fig-small", &format!("{value:.0} GB"));
        let ranks = 2_f64.powi(step);
        svg.text([x(ranks), bottom + 18.0], Anchor::Middle, "fig-small", &format!("{ranks:.0}"));
    }
    svg.text([(left + right) / 2.0, bottom + 38.0], Anchor::Middle, "fig-small", "ranks");
    svg.line([left, y(80.0)], [right, y(80.0)], "fig-limit");
    svg.text([right + 8.0, y(80.0) - 4.0], Anchor::Start, "fig-small", "80 GB");
    for stage in Stage::ALL {
        let points = (0..=6).map(|power| (2_u64.pow(power), 2_f64.powi(power as i32)));
        let points: Vec<_> = points.map(|(ranks, at)| [x(at), y(giga(stage, ranks))]).collect();
        svg.curve(&points, &format!("fig-curve{}", stage.number()));
        let end = [right + 8.0, points[6][1] + 4.0];
        svg.text(end, Anchor::Start, "fig-small", &format!("stage {}: {:.1} GB", stage.number(), giga(stage, 64)));
    }
    assert_figure("ranks", svg);
}
