//! How much of the communication of a training step runs beside its computation, over a slow link.
//!
//! `cargo bench --bench overlap -- --share 0.8`
//!
//! The link is imitated, or, with `--set-link` and a rank on each of several hosts, it is one that a command makes slow.
//!
//! Every rank trains the GPT of the examples at stage 3. `compute` is a step without the link: what the ranks compute and
//! copy between themselves in memory. `link` is what the link needs for all messages of a step, one after the other:
//! `α` for each and `β` for each byte. Gathers and reductions travel on two streams side by side, each at the full
//! speed of the link, as on a network with two directions, or over one real link; `link` is the sum of both, `gather` and
//! `reduce` the parts.
//! `exposed` is by how much the link makes a step longer, so `hidden`, the part of the link's time that no step sees, is
//! `1 - exposed / link`. `waited` is how long the model stood still by its own account, for slower peers too; it leaves
//! out the message about the norm.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::optim::AdamWConfig;
use clap::Parser;
use fsdp_benches::{GptShape, load_average, median};
use fsdp_burn::{
    Config, Error, FusedAdamW, LaunchOptions, Link, NonFinite, OpCount, OpKind, PrefetchConfig, Rank, Stage, Started,
    Trace, TrainingConfig, launch_with,
};
use fsdp_core::{Span, SpanKind, TraceStream};

#[derive(Clone, Debug, Parser)]
struct Args {
    #[command(flatten)]
    shape: GptShape,
    /// Ranks, where no launcher has started them.
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Prefetch depths to try, in forward and backward alike.
    #[arg(long, value_delimiter = ',', default_value = "0,1,2")]
    prefetch: Vec<usize>,
    /// Latency of the link, in microseconds.
    #[arg(long, default_value_t = 50.0)]
    latency_us: f64,
    /// Bandwidth of the link, in GB/s, in place of a share.
    #[arg(long, conflicts_with = "share")]
    bandwidth: Option<f64>,
    /// Chooses the bandwidth so that the link needs this share of the time that a step computes.
    #[arg(long, default_value_t = 0.8)]
    share: f64,
    /// Makes the links between hosts slow by this command of a shell, in place of imitating one: rank 0 runs it with the
    /// bandwidth in Mbit/s as its last argument, and 0 for none.
    #[arg(long)]
    set_link: Option<String>,
    /// Compute threads of a rank; 0 for its share of the cores.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Fails if less than this part of the link's time is hidden.
    #[arg(long)]
    at_least: Option<f64>,
    /// What happens to gradients that are not finite; all but `propagate` cost a message about their norm.
    #[arg(long, value_delimiter = ',', default_value = "propagate,error")]
    non_finite: Vec<String>,
    /// Times that every setting is run, one after the other.
    #[arg(long, default_value_t = 2)]
    rounds: usize,
    /// Steps before the clock starts. The first learns the order of the units, and prefetches nothing.
    #[arg(long, default_value_t = 2)]
    warmup: usize,
    /// Timed steps of each run.
    #[arg(long, default_value_t = 6)]
    steps: usize,
    /// Shows where a step waits longest: so many places for each setting.
    #[arg(long, default_value_t = 0)]
    waits: usize,
    /// Writes the trace of the last run to this file.
    #[arg(long)]
    trace: Option<PathBuf>,
    /// Set by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// One way to run the steps.
#[derive(Clone, Copy, Debug)]
struct Setting {
    prefetch: usize,
    non_finite: NonFinite,
    link: Option<Link>,
}

/// What the steps of a setting took.
#[derive(Clone, Debug, Default)]
struct Steps {
    /// Of each step, by its slowest rank.
    seconds: Vec<f64>,
    waited: Vec<f64>,
    /// Messages of a step.
    gathers: OpCount,
    reductions: OpCount,
    spans: Vec<Span>,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = Args::parse();
    let started = Config::default().started()?;
    match &started {
        Started::Process(process) => args.ranks = process.world_size,
        Started::Threads if args.set_link.is_some() => return Err("--set-link is for ranks on several hosts".into()),
        Started::Threads => {}
    }
    let is_main = started.is_main();
    let mut least = f64::INFINITY;
    for name in &args.non_finite {
        let non_finite = match name.as_str() {
            "propagate" => NonFinite::Propagate,
            "skip" => NonFinite::Skip,
            "error" => NonFinite::Error,
            _ => return Err(format!("--non-finite is propagate, skip or error, and not `{name}`").into()),
        };
        least = least.min(compare(&args, is_main, name, non_finite)?);
    }
    match args.at_least {
        Some(wanted) if !(least.is_finite() && least >= wanted) => {
            Err(format!("{least:.2} of the link's time is hidden, and not {wanted}").into())
        }
        _ => Ok(()),
    }
}

/// Runs all prefetch depths over the link, and one step without it, in turn. Returns the least part that is hidden.
fn compare(args: &Args, is_main: bool, name: &str, non_finite: NonFinite) -> Result<f64, Box<dyn std::error::Error>> {
    let without_link = Setting { prefetch: 1, non_finite, link: None };
    let mut compute = Steps::default();
    run(args, without_link, &mut compute)?;
    let link = choose_link(args, &compute);
    let mut runs: Vec<(usize, Steps)> = args.prefetch.iter().map(|&depth| (depth, Steps::default())).collect();
    let mut compute = Steps::default();
    for _ in 0..args.rounds {
        run(args, without_link, &mut compute)?;
        for (prefetch, steps) in &mut runs {
            run(args, Setting { prefetch: *prefetch, non_finite, link: Some(link) }, steps)?;
        }
    }
    let [gather, reduce] = [compute.gathers, compute.reductions].map(|count| link_seconds(link, count));
    let (compute_s, link_s) = (median(&compute.seconds), gather + reduce);
    let hidden = |steps: &Steps| 1.0 - (median(&steps.seconds) - compute_s) / link_s;
    let least = runs.iter().map(|(_, steps)| hidden(steps)).fold(f64::INFINITY, f64::min);
    if !is_main {
        return Ok(least);
    }
    println!(
        "\nnon_finite = {name}, {} ranks, {:.0} µs, {:.3} GB/s: {} gathers and {} reductions of {:.1} MB a step, load \
         average {}",
        args.ranks,
        link.alpha_s * 1e6,
        1e-9 / link.beta_s_per_byte,
        compute.gathers.num_ops,
        compute.reductions.num_ops,
        (compute.gathers.sent_bytes + compute.reductions.sent_bytes) as f64 / 1e6,
        load_average()
    );
    println!(
        "{:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}",
        "prefetch", "step s", "compute", "link", "gather", "reduce", "exposed", "waited", "hidden", "of max"
    );
    for (prefetch, steps) in &runs {
        let step = median(&steps.seconds);
        let exposed = step - compute_s;
        println!(
            "{prefetch:>8} {step:>8.3} {compute_s:>8.3} {link_s:>8.3} {gather:>8.3} {reduce:>8.3} {exposed:>8.3} \
             {:>8.3} {:>7.0}% {:>8.3}",
            median(&steps.waited),
            100.0 * hidden(steps),
            step / compute_s.max(link_s),
        );
    }
    for (prefetch, steps) in &runs {
        print_waits(args, *prefetch, &steps.spans);
    }
    Ok(least)
}

/// The link of the arguments; its bandwidth such that a step's messages take the share of its computation.
fn choose_link(args: &Args, compute: &Steps) -> Link {
    let alpha_s = args.latency_us * 1e-6;
    if let Some(bandwidth) = args.bandwidth {
        return Link { alpha_s, beta_s_per_byte: 1e-9 / bandwidth };
    }
    let num_ops = compute.gathers.num_ops + compute.reductions.num_ops;
    let sent_bytes = compute.gathers.sent_bytes + compute.reductions.sent_bytes;
    let left_s = args.share * median(&compute.seconds) - alpha_s * num_ops as f64;
    Link { alpha_s, beta_s_per_byte: left_s.max(0.0) / sent_bytes.max(1) as f64 }
}

fn link_seconds(link: Link, count: OpCount) -> f64 {
    link.alpha_s * count.num_ops as f64 + link.beta_s_per_byte * count.sent_bytes as f64
}

fn run(args: &Args, setting: Setting, steps: &mut Steps) -> Result<(), Box<dyn std::error::Error>> {
    let config = Config {
        stage: Stage::Parameters,
        world_size: args.ranks,
        prefetch: PrefetchConfig { forward: setting.prefetch, backward: setting.prefetch, ..PrefetchConfig::default() },
        threads_per_rank: args.threads,
        training: TrainingConfig { non_finite: setting.non_finite, ..TrainingConfig::default() },
        ..Config::default()
    };
    let trace = Arc::new(Trace::new());
    let imitated = setting.link.filter(|_| args.set_link.is_none());
    let options = LaunchOptions { trace: Some(trace.clone()), link: imitated };
    let (program, link) = (args.clone(), setting.link);
    let ranks = launch_with(&config, options, move |rank| {
        set_link(&program, &rank, link)?;
        train(&program, &rank)
    })?;
    steps.seconds.extend(&ranks[0].seconds);
    steps.waited.extend(&ranks[0].waited);
    (steps.gathers, steps.reductions) = (ranks[0].gathers, ranks[0].reductions);
    steps.spans = trace.spans();
    if let Some(file) = &args.trace {
        trace.write(file)?;
    }
    Ok(())
}

/// Makes the links between hosts as fast as asked for, if that is what the arguments want.
fn set_link(args: &Args, rank: &Rank, link: Option<Link>) -> Result<(), Error> {
    if let Some(command) = args.set_link.as_ref().filter(|_| rank.is_main()) {
        let mbit = link.map_or(0.0, |link| 8e-6 / link.beta_s_per_byte);
        let status =
            Command::new("sh").args(["-c", &format!("{command} {mbit:.3}")]).status().map_err(Error::program)?;
        if !status.success() {
            return Err(Error::program(format!("`{command} {mbit:.3}`: {status}")));
        }
    }
    rank.barrier()
}

/// The steps of a rank. Times are those of the slowest one.
fn train(args: &Args, rank: &Rank) -> Result<Steps, Error> {
    let device = rank.device();
    let mut model = rank.shard(args.shape.init(&device))?;
    let mut optim = rank.optimizer(FusedAdamW::new(&AdamWConfig::new().with_weight_decay(0.1))?)?;
    let mut steps = Steps::default();
    for step in 0..args.warmup + args.steps {
        let (inputs, targets) = args.shape.batch(step, rank.rank(), &device);
        if step == args.warmup {
            model.synchronize()?;
            rank.traffic().reset();
        }
        rank.barrier()?;
        model.reset_stats();
        let start = Instant::now();
        let loss = model.loss(inputs, targets);
        let gradients = model.backward(loss)?;
        optim.step(3e-4, &mut model, gradients)?;
        if step >= args.warmup {
            steps.seconds.push(start.elapsed().as_secs_f64());
            steps.waited.push(model.stats().exposed().as_secs_f64());
        }
    }
    model.synchronize()?;
    (steps.seconds, steps.waited) = (slowest(rank, &steps.seconds)?, slowest(rank, &steps.waited)?);
    let per_step = |kind| {
        let OpCount { num_ops, sent_bytes } = rank.traffic().of(kind);
        OpCount { num_ops: num_ops / args.steps as u64, sent_bytes: sent_bytes / args.steps as u64 }
    };
    (steps.gathers, steps.reductions) = (per_step(OpKind::AllGather), per_step(OpKind::ReduceScatter));
    Ok(steps)
}

/// Of each value, the largest of all ranks.
fn slowest(rank: &Rank, values: &[f64]) -> Result<Vec<f64>, Error> {
    let own: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
    let mut largest = vec![0.0_f64; values.len()];
    for bytes in rank.all_gather_bytes(&own)? {
        let values = bytes.as_chunks().0.iter().map(|bytes| f64::from_ne_bytes(*bytes));
        largest.iter_mut().zip(values).for_each(|(largest, value)| *largest = largest.max(value));
    }
    Ok(largest)
}

/// Where rank 0 stands still longest, in milliseconds per step of the last run.
fn print_waits(args: &Args, prefetch: usize, spans: &[Span]) {
    let timed = |span: &&Span| span.rank == 0 && span.step >= args.warmup as u64;
    let spans: Vec<&Span> = spans.iter().filter(timed).collect();
    let mut places: BTreeMap<String, Duration> = BTreeMap::new();
    for wait in spans.iter().filter(|span| span.kind == SpanKind::Wait) {
        *places.entry(place(wait, &spans)).or_default() += wait.end - wait.start;
    }
    let mut places: Vec<_> = places.into_iter().collect();
    places.sort_by_key(|(_, waited)| std::cmp::Reverse(*waited));
    for (place, waited) in places.iter().take(args.waits) {
        println!("  prefetch {prefetch}: {:>7.2} ms for {place}", waited.as_secs_f64() * 1e3 / args.steps as f64);
    }
}

/// What a wait was for: the communication of its unit that ended last before the wait did.
fn place(wait: &Span, spans: &[&Span]) -> String {
    let of_unit =
        |span: &&&Span| span.stream != TraceStream::Compute && (&span.unit, span.step) == (&wait.unit, wait.step);
    let ended = |span: &&&Span| span.end <= wait.end;
    let awaited = spans.iter().filter(of_unit).filter(ended).max_by_key(|span| span.end);
    let Some(awaited) = awaited else { return format!("{}, unknown", wait.unit) };
    // A unit is gathered for forward, and once more for backward unless it is kept.
    let again = spans.iter().filter(of_unit).any(|other| other.kind == awaited.kind && other.end < awaited.end);
    let name = if again { format!("{} again", awaited.kind.name()) } else { awaited.kind.name().to_owned() };
    format!("{name} {}", wait.unit)
}
