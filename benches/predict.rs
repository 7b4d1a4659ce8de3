//! The time of a step, predicted from a profile of the machine and a step of a single rank, beside the time that it takes.
//!
//! `cargo bench --bench predict`
//! `cargo bench --bench predict -- --rounds 5 --ranks 2 --sizes 256x4`

use std::thread;

use burn::optim::AdamWConfig;
use clap::Parser;
use fsdp_benches::{GptShape, load_average, median};
use fsdp_burn::{Config, Error, FusedAdamW, Rank, Stage, TrainingConfig, launch};
use fsdp_core::{
    Job, Machine, MeasuredStep, Profile, ProfileOptions, SimOptions, Speed, Table, Transformer, WorkTime, simulate,
};
use fsdp_examples::{Reading, StepClock, TypicalStep, num_cores};

#[derive(Clone, Debug, Parser)]
struct Args {
    #[command(flatten)]
    shape: GptShape,
    /// Width and blocks of the models, in place of --width and --layers
    #[arg(long, value_delimiter = ',', default_value = "128x4,256x6,512x8")]
    sizes: Vec<String>,
    #[arg(long, value_delimiter = ',', default_value = "1,2,4")]
    ranks: Vec<usize>,
    #[arg(long, value_delimiter = ',', default_value = "0,1,2,3")]
    stages: Vec<u8>,
    /// Everything is measured so many times, in turns
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Steps of a run that count; two before them do not
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// Ranks of the profile
    #[arg(long, default_value_t = 2)]
    profile_ranks: usize,
    /// Threads of each rank, also of the single one from which it is predicted; 0: an even share of the processors
    #[arg(long, default_value_t = 0)]
    threads_per_rank: usize,
    #[arg(long, hide = true)]
    bench: bool,
}

/// One model on some ranks at one stage, round by round.
struct Case {
    shape: GptShape,
    ranks: usize,
    stage: Stage,
    predicted_s: Vec<f64>,
    measured_s: Vec<f64>,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    let mut cases = Vec::new();
    let mut shapes = Vec::new();
    for size in &args.sizes {
        let (width, layers) = size.split_once('x').ok_or("a size is WIDTHxBLOCKS")?;
        let shape = GptShape { width: width.parse()?, layers: layers.parse()?, ..args.shape };
        shapes.push(shape);
        for &ranks in &args.ranks {
            // Alone, a rank does the same at each.
            let stages = if ranks == 1 { &args.stages[..1] } else { &args.stages[..] };
            for &stage in stages {
                let stage = Stage::try_from(stage)?;
                cases.push(Case { shape, ranks, stage, predicted_s: Vec::new(), measured_s: Vec::new() });
            }
        }
    }
    println!("{} processors, load average {}", num_cores(), load_average());
    for round in 0..args.rounds {
        let options = ProfileOptions { num_ranks: args.profile_ranks, max_bytes: 16 << 20, repetitions: 7 };
        let profile = Profile::measure(&options)?;
        for (index, shape) in shapes.iter().enumerate() {
            println!("round {round}, {}", args.sizes[index]);
            // The machine's speed drifts within a round: a case is predicted from the rank alone just before it and just after.
            let mut before: Option<(Alone, TypicalStep)> = None;
            for case in
                cases.iter_mut().filter(|case| (case.shape.width, case.shape.layers) == (shape.width, shape.layers))
            {
                let config = config(case.ranks, case.stage, args.threads_per_rank);
                let threads = config.compute_threads(num_cores());
                let alone = Alone { threads, copies: case.ranks.min(num_cores() / threads).max(1) };
                let earlier = match before {
                    Some((of, step)) if of == alone => step,
                    _ => alone.typical(&args, *shape)?,
                };
                let measured_s = typical(&args, *shape, &config)?.step.wall_s;
                let later = alone.typical(&args, *shape)?;
                let step = measured_step(shape, &alone.config(), &between(earlier, later));
                case.predicted_s.push(predict(shape, &config, &profile, &step));
                case.measured_s.push(measured_s);
                before = Some((alone, later));
            }
        }
        if round == 0 {
            println!("{}", profile.to_json());
        }
    }
    let mut table = Table::new(["model", "ranks", "stage", "predicted", "measured", "error"]);
    let mut worst: f64 = 0.0;
    for Case { shape, ranks, stage, predicted_s, measured_s } in &cases {
        let errors: Vec<f64> =
            predicted_s.iter().zip(measured_s).map(|(predicted, measured)| predicted / measured - 1.0).collect();
        let error = median(&errors);
        worst = worst.max(error.abs());
        table.row([
            format!("{} blocks of {}", shape.layers, shape.width),
            ranks.to_string(),
            stage.number().to_string(),
            format!("{:.1} ms", 1e3 * median(predicted_s)),
            format!("{:.1} ms", 1e3 * median(measured_s)),
            format!("{:+.1}%", 100.0 * error),
        ]);
    }
    println!(
        "\n{table}\nThe largest error is {:.1}%; each is the middle one of {} rounds.",
        100.0 * worst,
        args.rounds
    );
    println!("load average {}", load_average());
    Ok(())
}

/// A single rank, of which as many copies run at once as cores would be busy: a core whose neighbours compute is slower than
/// one alone, by a tenth here.
#[derive(Clone, Copy, PartialEq)]
struct Alone {
    threads: usize,
    copies: usize,
}

impl Alone {
    fn config(self) -> Config {
        config(1, Stage::Ddp, self.threads)
    }

    /// What a step of the slowest copy takes.
    fn typical(self, args: &Args, shape: GptShape) -> Result<TypicalStep, Error> {
        let copies: Vec<_> = (0..self.copies)
            .map(|_| {
                let (args, config) = (args.clone(), self.config());
                thread::spawn(move || typical(&args, shape, &config))
            })
            .collect();
        let mut slowest: Option<TypicalStep> = None;
        for copy in copies {
            let mut step = copy.join().map_err(|_| Error::program("a copy panicked"))??;
            // They were seconds of the process.
            for work in [&mut step.step, &mut step.optimizer] {
                work.cpu_s /= self.copies as f64;
            }
            slowest = slowest.filter(|other| other.step.wall_s > step.step.wall_s).or(Some(step));
        }
        slowest.ok_or_else(|| Error::program("there is no copy"))
    }
}

/// As the example `train` runs by default.
fn config(world_size: usize, stage: Stage, threads_per_rank: usize) -> Config {
    let training = TrainingConfig { gradient_clip_norm: Some(1.0), ..TrainingConfig::default() };
    Config { world_size, stage, threads_per_rank, training, ..Config::default() }
}

/// The mean of two measurements.
fn between(a: TypicalStep, b: TypicalStep) -> TypicalStep {
    let mean =
        |a: WorkTime, b: WorkTime| WorkTime { wall_s: (a.wall_s + b.wall_s) / 2.0, cpu_s: (a.cpu_s + b.cpu_s) / 2.0 };
    TypicalStep { step: mean(a.step, b.step), optimizer: mean(a.optimizer, b.optimizer) }
}

/// What `fsdp bench --report` takes from the report of a run.
fn measured_step(shape: &GptShape, config: &Config, typical: &TypicalStep) -> MeasuredStep {
    let TypicalStep { step, optimizer } = *typical;
    let pass = WorkTime { wall_s: step.wall_s - optimizer.wall_s, cpu_s: step.cpu_s - optimizer.cpu_s };
    let cores = num_cores();
    MeasuredStep {
        parameter_len: transformer(shape).parameter_len(),
        num_tokens: (shape.batch * shape.sequence) as u64,
        num_threads: config.compute_threads(cores) as u64,
        num_cores: cores as u64,
        pass,
        optimizer,
    }
}

fn transformer(shape: &GptShape) -> Transformer {
    let GptShape { vocabulary, width, layers, heads, sequence, recompute, .. } = *shape;
    Transformer { layers, width, heads, sequence, vocabulary, recompute }
}

/// Seconds of a step, as `fsdp simulate --profile` finds them.
fn predict(shape: &GptShape, config: &Config, profile: &Profile, step: &MeasuredStep) -> f64 {
    let num_threads = config.compute_threads(num_cores());
    let (pass_s, optimizer_s) = step.among(config.world_size, num_threads);
    let machine = Machine {
        network: profile.network(config.world_size, num_threads),
        speed: Speed::Measured { pass_s, optimizer_s },
    };
    let job = Job {
        num_tokens: step.num_tokens,
        recompute: shape.recompute,
        ..Job::configured(transformer(shape).shape(), config, machine)
    };
    simulate(&job.workload(config.stage), &SimOptions::default()).step_s
}

/// What a step of rank 0 takes, in a run like that of the example `train`.
fn typical(args: &Args, shape: GptShape, config: &Config) -> Result<TypicalStep, Error> {
    let num_steps = args.steps + 2;
    Ok(launch(config, move |rank| run(&rank, &shape, num_steps))?.swap_remove(0))
}

fn run(rank: &Rank, shape: &GptShape, num_steps: usize) -> Result<TypicalStep, Error> {
    let device = rank.device();
    let mut model = rank.shard(shape.init(&device))?;
    let mut optimizer = rank.optimizer(FusedAdamW::new(&AdamWConfig::new().with_weight_decay(0.01))?)?;
    rank.barrier()?;
    let mut clock = StepClock::start();
    for step in 0..num_steps {
        let (inputs, targets) = shape.batch(step, rank.rank(), &device);
        let loss = model.loss(inputs, targets);
        let value = f64::from(loss.clone().into_scalar::<f32>());
        let gradients = model.backward(loss)?;
        let (before, asked) = (model.stats().exposed(), Reading::now());
        optimizer.step(1e-3, &mut model, gradients)?;
        clock.optimized(asked, (model.stats().exposed() - before).as_secs_f64());
        rank.mean(value)?;
        clock.next();
    }
    Ok(clock.typical())
}
