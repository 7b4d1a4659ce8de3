//! Checks in less than eight minutes, after the build, that GPUs train as they should, and prints a table: parity with the
//! processor, steps by every way between devices, memory beside its prediction, growth, tokens per second beside PyTorch's
//! FSDP2, and the share of the device's matrix rate.
//!
//!     cargo run --release --features fsdp-examples/cuda --example gpu_check
//!
//! cuda/README.md says what the rows mean. `--device cpu --small` runs the same program on the processor, with the feature
//! `cpu`.

use std::ops::Range;
use std::process::{Command, ExitCode};
use std::time::Instant;

use burn::module::Module;
use burn::optim::AdamWConfig;
use burn::tensor::Device;
use clap::Parser;
use fsdp_burn::{
    Config, DeviceChoice, Dtype, Error, Exchange, FusedAdamW, OptimizerKind, Rank, Stage, human_bytes, launch,
};
use fsdp_core::Table;
use fsdp_examples::{Gpt, GptConfig, Text, activations};

#[derive(Clone, Debug, Parser)]
#[command(name = "gpu_check", about = "Checks that GPUs train as they should, and prints a table.")]
struct Args {
    /// What to check: "cuda", a GPU for each rank, or "cpu", the same kernels on the processor
    #[arg(long, default_value = "cuda", value_parser = ["cuda", "cpu"])]
    device: String,
    /// GPUs, and ranks of the timed runs [default: all that `nvidia-smi` lists]
    #[arg(long)]
    ranks: Option<usize>,
    /// Tiny models everywhere, to see the program run
    #[arg(long)]
    small: bool,
    /// The Python that has PyTorch, for the row of FSDP2
    #[arg(long, default_value = "python3")]
    python: String,
}

/// The model of parity, small enough for the processor.
const SMALL: GptConfig = GptConfig { layers: 2, width: 32, heads: 2, sequence: 16, vocabulary: 256, recompute: false };
const TINY: GptConfig = GptConfig { layers: 1, width: 8, heads: 2, sequence: 4, vocabulary: 256, recompute: false };
/// The model of the timed steps: 203 million parameters.
const LARGE: GptConfig =
    GptConfig { layers: 16, width: 1024, heads: 16, sequence: 1024, vocabulary: 256, recompute: false };

/// What the losses of one kind of kernel may differ from those of another, relative.
const PARITY: f64 = 1e-4;
/// A step at stage 3 beside one at stage 0, on one GPU.
const SLOWER: f64 = 1.05;

fn main() -> ExitCode {
    match check(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A row of the table: what, its value, and its bar with whether it is reached.
type Row = (String, String, Option<(String, bool)>);

/// Whether every bar is reached.
fn check(args: &Args) -> Result<bool, Error> {
    let own = if args.device == "cpu" { DeviceChoice::Cpu } else { DeviceChoice::Cuda };
    let shared = if args.device == "cpu" { DeviceChoice::Cpu } else { DeviceChoice::CudaAt(0) };
    // Opened first: what is missing is told before anything is computed.
    launch(&Config { device: shared, ..Config::default() }, |_| Ok(()))?;
    let gpus = gpu_names();
    let ranks = args.ranks.unwrap_or(gpus.len()).max(1);
    let mut rows: Vec<Row> = Vec::new();
    rows.push(("device".into(), gpus.first().cloned().unwrap_or_else(|| args.device.clone()), None));
    parity(args, own, shared, ranks, &mut rows)?;
    let model = if args.small { TINY } else { LARGE };
    speed(args, own, ranks, gpus.first(), &model, &mut rows)?;
    growth(args, shared, &mut rows)?;
    let mut table = Table::new(["check", "value", "bar", ""]);
    for (what, value, bar) in &rows {
        let (bar, mark) = match bar {
            Some((bar, true)) => (bar.as_str(), "reached"),
            Some((bar, false)) => (bar.as_str(), "NOT REACHED"),
            None => ("", ""),
        };
        table.row([what.as_str(), value, bar, mark]);
    }
    println!("{table}");
    Ok(rows.iter().all(|(_, _, bar)| bar.as_ref().is_none_or(|(_, reached)| *reached)))
}

/// All GPUs of this host, by name.
fn gpu_names() -> Vec<String> {
    let said = Command::new("nvidia-smi").args(["--query-gpu=name", "--format=csv,noheader"]).output();
    let names = said.map(|said| String::from_utf8_lossy(&said.stdout).into_owned()).unwrap_or_default();
    names.lines().map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).collect()
}

fn config(device: DeviceChoice, stage: Stage, world_size: usize) -> Config {
    Config { device, stage, world_size, seed: Some(1), timeout_s: 120.0, ..Config::default() }
}

/// A run of one kind, and what it is like.
#[derive(Clone, Debug)]
struct Run {
    model: GptConfig,
    batch: usize,
    steps: usize,
    /// Same weights on every device.
    built_on_the_processor: bool,
}

/// What a rank has seen.
#[derive(Clone, Debug, Default)]
struct Seen {
    losses: Vec<f64>,
    step_s: Vec<f64>,
    num_parameters: usize,
    /// Bytes in use on the device after each step, and reserved at the end.
    used_bytes: Vec<u64>,
    reserved_bytes: u64,
    predicted_bytes: u64,
}

impl Run {
    fn on(&self, config: &Config) -> Result<Seen, Error> {
        let run = self.clone();
        let built = self.built_on_the_processor.then(|| self.build_on_the_processor());
        Ok(launch(config, move |rank| run.train(&rank, built.clone()))?.swap_remove(0))
    }

    fn build_on_the_processor(&self) -> Gpt {
        // What moves keeps its way of gradient checkpointing, which must be that of the inputs.
        let device = Device::flex().autodiff().gradient_checkpointing();
        device.seed(1);
        let model = self.model.init(&device);
        // Weights are drawn when they are looked at, and where a model with nothing drawn is moved to. Moving a copy looks.
        drop(model.clone().fork(&device));
        model
    }

    fn train(&self, rank: &Rank, built: Option<Gpt>) -> Result<Seen, Error> {
        let text = Text::load(None, self.model.sequence).map_err(Error::program)?;
        let device = rank.device();
        let model = match built {
            Some(built) => built.fork(&device),
            None => self.model.init(&device),
        };
        let mut model = rank.shard(model)?;
        let mut optimizer = rank.optimizer(FusedAdamW::new(&AdamWConfig::new())?)?;
        let rows: Range<usize> = rank.rank() * self.batch..(rank.rank() + 1) * self.batch;
        let mut seen = Seen { num_parameters: model.num_params(), ..Seen::default() };
        let estimate = model.memory_estimate(OptimizerKind::Adam, Some(activations(&self.model, self.batch, 0)));
        let state = estimate.parameter_bytes + estimate.gradient_bytes + estimate.optimizer_bytes;
        let held = estimate.gathered_bytes + estimate.activation_bytes.unwrap_or(0).max(estimate.in_flight_bytes);
        seen.predicted_bytes = state + held;
        for step in 0..self.steps {
            let batch = text.batch(1, step, rows.clone(), &device);
            rank.barrier()?;
            let begun = Instant::now();
            let loss = model.loss(batch.inputs, batch.targets);
            let gradients = model.backward(loss.clone())?;
            optimizer.step(1e-3, &mut model, gradients)?;
            model.synchronize()?;
            device.sync().map_err(|error| Error::program(format!("the device has failed: {error:?}")))?;
            seen.step_s.push(begun.elapsed().as_secs_f64());
            seen.losses.push(rank.mean(f64::from(loss.into_scalar::<f32>()))?);
            if let Some(memory) = rank.device_memory() {
                seen.used_bytes.push(memory.used_bytes);
                seen.reserved_bytes = memory.reserved_bytes;
            }
        }
        Ok(seen)
    }
}

/// The same few steps on the processor and on devices, at every stage.
fn parity(
    args: &Args,
    own: DeviceChoice,
    shared: DeviceChoice,
    ranks: usize,
    rows: &mut Vec<Row>,
) -> Result<(), Error> {
    let model = if args.small { TINY } else { SMALL };
    let run = Run { model, batch: 2, steps: if args.small { 2 } else { 5 }, built_on_the_processor: true };
    use Exchange::{Device as Between, Host};
    let mut places = vec![
        ("one device".to_owned(), shared, 1, Host),
        ("2 ranks on one device".into(), shared, 2, Host),
        ("2 ranks on one device, within it".into(), shared, 2, Between),
    ];
    if ranks > 1 && own != shared {
        places.push((format!("{ranks} devices"), own, ranks, Host));
        places.push((format!("{ranks} devices, by NCCL"), own, ranks, Between));
    }
    for (place, device, world_size, collectives) in places {
        let expected = run.on(&config(DeviceChoice::Flex, Stage::Ddp, world_size))?.losses;
        let on = |stage| Config { collectives, ..config(device, stage, world_size) };
        let all: Vec<_> = Stage::ALL.iter().map(|&stage| run.on(&on(stage))).collect();
        let all: Vec<_> = all.into_iter().map(|seen| Ok(seen?.losses)).collect::<Result<_, Error>>()?;
        let differences = all.iter().flatten().zip(expected.iter().cycle()).map(|(a, b)| (a - b).abs() / b.abs());
        let largest = differences.fold(0.0, f64::max);
        let bar = (format!("at most {PARITY:e}"), largest <= PARITY);
        rows.push((format!("{place}: losses against the processor"), format!("{largest:.1e}"), Some(bar)));
        let same = all.iter().all(|losses| *losses == all[0]);
        // NCCL adds in an order of its own.
        let bar = (device == shared).then(|| ("the same bits".to_owned(), same));
        rows.push((format!("{place}: all stages"), same_bits(same).into(), bar));
    }
    Ok(())
}

fn same_bits(same: bool) -> &'static str {
    if same { "the same bits" } else { "other bits" }
}

/// Steps of a model that keeps a GPU busy.
fn speed(
    args: &Args,
    device: DeviceChoice,
    ranks: usize,
    gpu: Option<&String>,
    model: &GptConfig,
    rows: &mut Vec<Row>,
) -> Result<(), Error> {
    let (batch, steps) = if args.small { (1, 3) } else { (8, 12) };
    let run = Run { model: model.clone(), batch, steps, built_on_the_processor: false };
    let timed = |stage, collectives| {
        let mut config = Config { collectives, ..config(device, stage, ranks) };
        if device != DeviceChoice::Cpu {
            config.precision.parameters = Dtype::Bf16;
        }
        run.on(&config)
    };
    let tokens = (ranks * batch * model.sequence) as f64;
    let plain = timed(Stage::Ddp, Exchange::Host)?;
    let plain_s = median(&plain.step_s);
    rows.push((format!("{ranks} ranks: stage 0, step"), format!("{plain_s:.3} s"), None));
    let mut best_s = f64::INFINITY;
    for collectives in Exchange::ALL.iter().copied() {
        let seen = timed(Stage::Parameters, collectives)?;
        let step_s = median(&seen.step_s);
        let is_first = collectives == Exchange::Host;
        let bar = (format!("at most {SLOWER} of stage 0"), step_s <= SLOWER * plain_s);
        let bar = (ranks == 1 && !args.small && is_first).then_some(bar);
        rows.push((format!("{ranks} ranks: stage 3, by \"{collectives}\", step"), format!("{step_s:.3} s"), bar));
        if is_first {
            let [held, predicted] = [seen.reserved_bytes, seen.predicted_bytes].map(human_bytes);
            rows.push(("stage 3: reserved on a device".into(), format!("{held}, predicted {predicted}"), None));
        }
        best_s = best_s.min(step_s);
    }
    let tokens_per_s = tokens / best_s;
    rows.push(("stage 3: tokens per second".into(), format!("{tokens_per_s:.0}"), None));
    // Two operations for each weight and token forward, twice as many backward; and attention's two products.
    let attention = 12 * model.layers * model.width * model.sequence;
    let flops = tokens_per_s / ranks as f64 * (6 * plain.num_parameters + attention) as f64;
    let known = fsdp_core::Device::ALL.iter().find(|known| gpu.is_some_and(|gpu| gpu.contains(known.name)));
    let share =
        known.map(|known| format!(", {:.1}% of the {} peak in 16 bits", 100.0 * flops / known.flops_16, known.name));
    rows.push((
        "stage 3: matrix rate of a device".into(),
        format!("{:.1} TFLOP/s{}", flops / 1e12, share.unwrap_or_default()),
        None,
    ));
    if device != DeviceChoice::Cpu {
        rows.push(("PyTorch FSDP2: tokens per second".into(), fsdp2(args, ranks, batch, steps, model), None));
    }
    Ok(())
}

/// What the same model reaches under PyTorch, or why it cannot be told.
fn fsdp2(args: &Args, ranks: usize, batch: usize, steps: usize, model: &GptConfig) -> String {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/cuda/fsdp2.py");
    let sizes = [model.layers, model.width, model.heads, model.sequence, model.vocabulary, batch, steps];
    // Its own wait for peers that never come is longer than the time of all checks.
    let mut command = Command::new("timeout");
    command.args([
        "--kill-after=10",
        "180",
        &args.python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        &ranks.to_string(),
        script,
    ]);
    command.args(sizes.map(|size| size.to_string()));
    let said = match command.output() {
        Ok(said) => said,
        Err(error) => return format!("not run: {}: {error}", args.python),
    };
    let output = String::from_utf8_lossy(&said.stdout);
    let found = output.lines().find_map(|line| line.strip_prefix("tokens per second: "));
    let last = String::from_utf8_lossy(&said.stderr).lines().last().unwrap_or("it says nothing").to_owned();
    found.map_or_else(|| format!("not run: {last}"), str::to_owned)
}

/// Many steps of a small model: what is in use after them is what was in use before.
fn growth(args: &Args, device: DeviceChoice, rows: &mut Vec<Row>) -> Result<(), Error> {
    let (model, steps) = if args.small { (TINY, 4) } else { (SMALL, 100) };
    let run = Run { model, batch: 2, steps, built_on_the_processor: false };
    let used = run.on(&config(device, Stage::Parameters, 1))?.used_bytes;
    let [Some(early), Some(late)] = [used.get(1), used.last()] else { return Ok(()) };
    let bar = ("no growth".to_owned(), late <= early);
    let value = format!("{} and {}", human_bytes(*early), human_bytes(*late));
    rows.push((format!("in use after step 2 and step {steps}"), value, Some(bar)));
    Ok(())
}

/// Of the steps after the first two, in which kernels are compiled.
fn median(step_s: &[f64]) -> f64 {
    let mut steady = step_s[2.min(step_s.len() - 1)..].to_vec();
    steady.sort_by(f64::total_cmp);
    steady[steady.len() / 2]
}
