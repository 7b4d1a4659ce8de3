//! Trains a byte-level GPT on four ranks, each a thread of this process, and shows what that took. Started by `mpirun`,
//! `torchrun` or `srun`, each process is a rank.
//!
//!     cargo run --release --example train
//!     cargo run --release --example train -- --config examples/configs/zero1.toml --data my.txt --report run.json
//!
//! `train` below is what every rank runs: the loop of any Burn program, with `shard`, `backward` and `step` of
//! fsdp-burn. The rest tells about it.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::optim::AdamWConfig;
use clap::Parser;
use fsdp_burn::{
    Activations, Config, EngineStats, Error, FusedAdamW, LaunchOptions, OptimizerKind, Rank, ShardedModel, Started,
    Trace, Translated, human_bytes, launch_with,
};
use fsdp_examples::{
    Args, Checkpoints, DiskRow, Failure, Gpt, GptConfig, ProcessMemory, Progress, RankRow, Reading, Report, Sampler,
    StepClock, StepMeans, StepNews, Text, TypicalStep, WallTimes, activations, disk_table, give_memory_back_if_scarce,
    limit_memory, memory_table, num_cores, plot_losses, resident_peak, settings, step_table, time_table,
};
use peak_alloc::PeakAlloc;

/// Counts what the process has allocated.
#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

fn main() -> ExitCode {
    let args = Args::parse();
    give_memory_back_if_scarce(&args);
    match run(&args) {
        Ok(_) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {failure}");
            failure.exit_code()
        }
    }
}

/// What all ranks share.
struct Job {
    args: Args,
    model: GptConfig,
    text: Text,
    checkpoints: Option<Checkpoints>,
}

impl Job {
    /// What a rank holds beside its state.
    fn activations(&self, config: &Config) -> Activations {
        activations(&self.model, self.args.batch, config.compute_threads(num_cores()))
    }
}

/// What a rank returns.
struct Outcome {
    losses: Vec<f64>,
    num_parameters: usize,
    row: RankRow,
    /// Of all ranks.
    rows: Vec<RankRow>,
    typical: TypicalStep,
    wall: WallTimes,
    peak_bytes: u64,
    resident_bytes: Option<u64>,
    sample: Vec<u8>,
}

/// One run: all ranks, then pictures and tables of it.
fn run(args: &Args) -> Result<Report, Failure> {
    let (mut args, deepspeed) = args.with_deepspeed()?;
    let config = args.resolve_config()?;
    let started = config.started().map_err(Error::from)?;
    args.quiet |= !started.is_main();
    let args = &args;
    let model = args.model()?;
    let text = Text::load(args.data.as_deref(), args.sequence)?;
    if let Some(bytes) = args.memory_limit {
        limit_memory(bytes)?;
    }
    if !args.quiet {
        println!("{started}\n");
        println!("{}, {} ranks\n\n{}", config.stage, config.world_size, settings(&config));
        println!("Text: {}, {}\n", text.origin(), human_bytes(text.num_bytes() as u64));
        // What a DeepSpeed file asks for in vain is said.
        for item in deepspeed.iter().flat_map(Translated::missing) {
            println!("Not there: {item}");
        }
    }
    let job = Arc::new(Job { args: args.clone(), model, text, checkpoints: Checkpoints::new(args)? });
    // The sample after the last step is none of it.
    let trace = args.trace.as_ref().map(|_| Arc::new(Trace::of_steps(0..args.trace_steps.min(args.steps) as u64)));
    let outcomes = {
        let (job, options) = (job.clone(), LaunchOptions { trace: trace.clone(), ..LaunchOptions::default() });
        launch_with(&config, options, move |rank| train(&rank, &job))?
    };
    let report = report(&config, &job, &outcomes);
    if !started.is_main() {
        return Ok(report);
    }
    let plot = args.plot_path();
    plot_losses(&report.losses, &format!("{} on {} ranks", config.stage, config.world_size), &plot)?;
    if let Some(file) = &args.report {
        report.write(file)?;
    }
    if let Some((trace, file)) = trace.zip(args.trace.as_ref()) {
        trace.write(file).map_err(|error| Failure::write(file, error))?;
    }
    if !args.quiet {
        print_results(&report, args);
    }
    Ok(report)
}

/// The program of every rank.
fn train(rank: &Rank, job: &Job) -> Result<Outcome, Error> {
    let Job { args, model: sizes, text, checkpoints } = job;
    let started = Instant::now();
    let device = rank.device();
    if rank.is_main() {
        // All ranks get rank 0's weights, so its random numbers are the ones that count.
        device.seed(args.seed);
    }
    let mut model = rank.shard(sizes.init(&device))?;
    check_memory(rank, &model, job)?;
    let mut optimizer = rank.optimizer(FusedAdamW::new(&AdamWConfig::new().with_weight_decay(0.01))?)?;
    if rank.is_main() {
        if !args.quiet {
            print_plan(&model, rank, job);
        }
        ALLOCATOR.reset_peak_usage();
    }
    let first = match checkpoints {
        Some(checkpoints) => checkpoints.resume(rank, &mut model, &mut optimizer)?,
        None => 0,
    };
    let mut saver = match checkpoints {
        Some(checkpoints) => checkpoints.saver(rank)?,
        None => None,
    };
    if first >= args.steps {
        let problem = format!("the checkpoint has {first} steps, and --steps is {}; pass a larger one", args.steps);
        return Err(Error::program(problem));
    }
    rank.barrier()?;
    let setup_s = started.elapsed().as_secs_f64();

    let progress = Progress::new(args.steps, args.quiet || !rank.is_main());
    let micro_batches = rank.config().training.gradient_accumulation;
    let mut losses = Vec::new();
    let mut waited_for_losses = Duration::ZERO;
    model.reset_stats();
    rank.traffic().reset();
    let (started, mut clock) = (Instant::now(), StepClock::start());
    for step in first..args.steps {
        let mut sum = 0.0;
        for micro_batch in step * micro_batches..(step + 1) * micro_batches {
            let first_row = rank.rank() * args.batch;
            let batch = text.batch(args.seed, micro_batch, first_row..first_row + args.batch, &device);
            let loss = model.loss(batch.inputs, batch.targets);
            sum += f64::from(loss.clone().into_scalar::<f32>());
            let gradients = model.backward(loss)?;
            let (before, asked) = (stood_still_s(&model.stats()), Reading::now());
            optimizer.step(args.learning_rate(step), &mut model, gradients)?;
            clock.optimized(asked, stood_still_s(&model.stats()) - before);
        }
        let asked = Instant::now();
        losses.push(rank.mean(sum / micro_batches as f64)?);
        waited_for_losses += asked.elapsed();
        clock.next();

        let elapsed_s = started.elapsed().as_secs_f64();
        progress.step(StepNews {
            step,
            loss: losses[step - first],
            tokens_per_second: (tokens_per_step(rank.config(), args) * losses.len()) as f64 / elapsed_s,
            waiting: (model.stats().exposed() + waited_for_losses).as_secs_f64() / elapsed_s,
        });
        if let Some(checkpoints) = checkpoints
            && checkpoints.after_step(rank, &model, &optimizer, saver.as_mut(), step + 1, step + 1 == args.steps)?
        {
            break;
        }
    }
    let training_s = started.elapsed().as_secs_f64();
    progress.finish();
    model.synchronize()?;
    rank.barrier()?;
    let (peak_bytes, resident_bytes) = (ALLOCATOR.peak_usage() as u64, resident_peak());
    let stats = model.stats();
    let exposed_s = stood_still_s(&stats);
    let waiting_s = exposed_s + waited_for_losses.as_secs_f64();
    let traffic = rank.traffic().total();
    let row = RankRow {
        rank: rank.rank(),
        num_local_parameters: model.num_local_params(),
        predicted: (&model.memory_estimate(OptimizerKind::Adam, Some(job.activations(rank.config())))).into(),
        measured: (&stats).into(),
        sent_bytes: traffic.sent_bytes,
        num_collectives: traffic.num_ops,
        computing_s: training_s - waiting_s,
        optimizer_s: clock.optimizer_s(),
        waiting_s,
        communication_s: stats.communication.as_secs_f64(),
        exposed_s,
        overlap: stats.overlap(),
        disk: rank.tier_stats().map(|tier| DiskRow::new(&tier, stats.tier_wait.as_secs_f64())),
    };

    let rows = rank.all_gather_bytes(&serde_json::to_vec(&row).map_err(Error::program)?)?;
    let rows = rows.iter().map(|row| serde_json::from_slice(row).map_err(Error::program)).collect::<Result<_, _>>()?;

    let started = Instant::now();
    let sampler = Sampler { num_bytes: args.sample, temperature: args.temperature, seed: args.seed };
    let sample = sampler.continue_text(&model.valid(), text.prompt(args.seed), args.sequence, &device.inner());
    let wall = WallTimes { setup_s, training_s, sampling_s: started.elapsed().as_secs_f64() };
    let (num_parameters, typical) = (model.num_params(), clock.typical());
    Ok(Outcome { losses, num_parameters, row, rows, typical, wall, peak_bytes, resident_bytes, sample })
}

/// Refuses a run that will not fit, before it has taken the memory that it may have.
fn check_memory(rank: &Rank, model: &ShardedModel<Gpt>, job: &Job) -> Result<(), Error> {
    let Some(limit) = job.args.memory_limit else { return Ok(()) };
    let activations = job.activations(rank.config());
    let own = model.memory_estimate(OptimizerKind::Adam, Some(activations)).peak_bytes().unwrap_or_default();
    // A limit is a process's: threads share it, and a rank that is a process has it alone. All ranks decide alike.
    let all = rank.all_gather_bytes(&own.to_le_bytes())?;
    let all = all.iter().map(|bytes| bytes.as_chunks().0.first().map_or(0, |bytes| u64::from_le_bytes(*bytes)));
    let predicted: u64 = match rank.config().started()? {
        Started::Threads => all.sum(),
        Started::Process(_) => all.max().unwrap_or(own),
    };
    if predicted <= limit {
        return Ok(());
    }
    Err(Error::program(format!(
        "a process is predicted to hold {}, and --memory-limit is {}; place state on a disk with [offload], use \
         --recompute, or make the model or the batch smaller",
        human_bytes(predicted),
        human_bytes(limit)
    )))
}

/// Seconds in which the model stood still for its parameters, gradients or optimizer state.
fn stood_still_s(stats: &EngineStats) -> f64 {
    (stats.exposed() + stats.tier_wait).as_secs_f64()
}

fn tokens_per_step(config: &Config, args: &Args) -> usize {
    config.world_size * config.training.gradient_accumulation * args.batch * args.sequence
}

fn report(config: &Config, job: &Job, outcomes: &[Outcome]) -> Report {
    let Outcome { losses, num_parameters, rows: ranks, typical, wall, peak_bytes, resident_bytes, sample, .. } =
        &outcomes[0];
    let tokens_per_step = tokens_per_step(config, &job.args);
    let of_process: Vec<_> = outcomes.iter().map(|outcome| outcome.row.clone()).collect();
    Report {
        config: Report::config_value(config),
        model: job.model.clone(),
        num_parameters: *num_parameters,
        data: job.text.origin().to_owned(),
        seed: job.args.seed,
        tokens_per_step,
        losses: losses.clone(),
        tokens_per_second: (tokens_per_step * losses.len()) as f64 / wall.training_s,
        process: ProcessMemory::new(
            &of_process,
            job.activations(config),
            job.text.num_bytes() as u64,
            Some(*peak_bytes),
            *resident_bytes,
        ),
        step: StepMeans::new(ranks, losses.len()),
        num_cores: num_cores(),
        typical: *typical,
        ranks: ranks.clone(),
        wall: *wall,
        sample: String::from_utf8_lossy(sample).into_owned(),
    }
}

/// What is known before the first step.
fn print_plan(model: &ShardedModel<Gpt>, rank: &Rank, job: &Job) {
    println!("Units, in elements; local is what rank 0 stores\n");
    for line in model.summary().lines() {
        println!("  {line}");
    }
    for warning in model.plan().warnings() {
        println!("\nwarning: {warning}");
    }
    let activations = job.activations(rank.config());
    println!("\nMemory of rank 0, predicted\n");
    for line in model.memory_estimate(OptimizerKind::Adam, Some(activations)).to_string().lines() {
        println!("  {line}");
    }
    println!("\n{} steps of {} tokens\n", job.args.steps, tokens_per_step(rank.config(), &job.args));
}

fn print_results(report: &Report, args: &Args) {
    let Report { losses, ranks, process, wall, .. } = report;
    let (first, last) = (losses.first().copied().unwrap_or(0.0), losses.last().copied().unwrap_or(0.0));
    println!("\nLoss {first:.4} to {last:.4} in {:.1} s, {:.0} tokens/s", wall.training_s, report.tokens_per_second);
    println!("\nPeak memory by rank\n\n{}", memory_table(ranks));
    let measured = process.measured_bytes.map_or("not counted".to_owned(), human_bytes);
    println!("  Predicted is a rank's part of what all ranks share; measured is all it holds, shared or not.");
    println!("  Peak of the process: predicted {}, measured {measured}", human_bytes(process.predicted_bytes));
    if let Some(resident) = process.resident_bytes {
        let limit = args.memory_limit.map_or(String::new(), |limit| format!("; the limit is {}", human_bytes(limit)));
        println!("  Resident, with the program and all that the allocator keeps: {}{limit}", human_bytes(resident));
    }
    println!("\nCommunication by rank\n\n{}", time_table(ranks));
    if let Some(disks) = disk_table(ranks) {
        println!("Disks by rank, over the whole run; waiting is for them alone\n\n{disks}");
    }
    println!(
        "Where a step goes, mean over ranks and steps; bytes are the largest peak of a rank\n\n{}",
        step_table(report)
    );
    println!("Loss curve: {}", args.plot_path().display());
    if let Some(file) = &args.report {
        println!("Report: {}", file.display());
    }
    if let Some(file) = &args.trace {
        let num_steps = args.trace_steps.min(args.steps);
        println!("Trace of {num_steps} steps: {}; open it at https://ui.perfetto.dev", file.display());
    }
    if args.sample > 0 {
        println!("\nSample, {:.1} s for {} bytes\n\n{}", wall.sampling_s, args.sample, report.sample);
    }
}

#[cfg(test)]
#[path = "tests/train.rs"]
mod tests;
