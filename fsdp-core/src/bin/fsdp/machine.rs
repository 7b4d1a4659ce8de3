//! The options that say what the ranks run on.

use std::error::Error;
use std::path::PathBuf;

use clap::Args;
use fsdp_core::{
    Axis, Collectives, Config, Device, Job, Link, Machine, MeasuredStep, Mesh, NamedLink, Network, Profile, Speed,
    Stage, grouped,
};

use crate::model::{Model, ModelArgs};
use crate::number::{MOST, MOST_RANKS, between, up_to};
use crate::rate::{rate, seconds};
use crate::size::parse_size;
use crate::tiers::TierArgs;

#[derive(Args)]
#[command(next_help_heading = "Ranks and machine")]
pub(crate) struct MachineArgs {
    /// Configuration of the run, TOML or JSON: stage, mesh, prefetch, accumulation, clipping
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Number of ranks, one on each GPU, in place of the configuration's
    #[arg(long, value_name = "N", value_parser = up_to(MOST_RANKS))]
    gpus: Option<usize>,
    /// Copies of the model, each cut over the other ranks, in place of the configuration's mesh
    #[arg(long, value_name = "N", value_parser = up_to(MOST_RANKS))]
    replicate: Option<usize>,
    /// GPUs of one node
    #[arg(long, value_name = "N", default_value = "8", value_parser = up_to(MOST))]
    gpus_per_node: usize,
    /// Device: H100, H200, A100 or 4090 [default: H100, unless --profile is given]
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// Memory of a device, in place of the known one, such as 40GB
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    device_memory: Option<u64>,
    /// Link in a node: nvlink4, nvlink3, pcie5, pcie4, ... [default: the device's]
    #[arg(long, value_name = "NAME")]
    link: Option<String>,
    /// Link between nodes: ib-ndr, ib-hdr, eth-100g, eth-25g, eth-10g, for each GPU
    #[arg(long, value_name = "NAME", default_value = "ib-ndr")]
    node_link: String,
    /// Latency α in a node, in microseconds, in place of the link's
    #[arg(long, value_name = "US", value_parser = between(0.0, 1e9))]
    alpha_us: Option<f64>,
    /// Bandwidth 1/β in a node, in GB/s, in place of the link's
    #[arg(long, value_name = "GBS", value_parser = between(1e-9, 1e9))]
    bandwidth: Option<f64>,
    /// Latency α between nodes, in microseconds
    #[arg(long, value_name = "US", value_parser = between(0.0, 1e9))]
    node_alpha_us: Option<f64>,
    /// Bandwidth 1/β between nodes, in GB/s for each GPU
    #[arg(long, value_name = "GBS", value_parser = between(1e-9, 1e9))]
    node_bandwidth: Option<f64>,
    /// Share of the device's arithmetic that is reached
    #[arg(long, value_name = "SHARE", default_value = "0.4", value_parser = between(1e-6, 1.0))]
    mfu: f64,
    /// Floating-point operations per second that are reached, in place of device and share
    #[arg(long, value_name = "RATE", value_parser = between(1.0, 1e24))]
    flops: Option<f64>,
    /// Profile of this machine, as `fsdp bench --out` writes it, in place of links
    #[arg(long, value_name = "FILE", conflicts_with_all = ["link", "alpha_us", "bandwidth"])]
    profile: Option<PathBuf>,
    /// Measured seconds of one micro-batch on one rank, forward and backward, in place of rates
    #[arg(long, value_name = "S", value_parser = between(1e-9, 1e9), requires = "optimizer_s")]
    pass_s: Option<f64>,
    /// Measured seconds of the optimizer's step on one rank
    #[arg(long, value_name = "S", value_parser = between(0.0, 1e9), requires = "pass_s")]
    optimizer_s: Option<f64>,
    #[command(flatten)]
    tiers: TierArgs,
}

/// Lines of the report: a word and what it is.
pub(crate) type Told = Vec<(&'static str, String)>;

/// The job on its machine, and what is said of it in the report.
pub(crate) struct Setting {
    pub(crate) config: Config,
    pub(crate) job: Job,
    pub(crate) device_bytes: Option<u64>,
    pub(crate) told: Told,
}

impl MachineArgs {
    pub(crate) fn setting(&self, model: &ModelArgs) -> Result<Setting, Box<dyn Error>> {
        let mut config = self.config()?;
        if let Some(precision) = model.precision {
            config.precision.parameters = precision.dtype();
        }
        let model = model.model(&config)?;
        check_work(&config, model.shape.units.len())?;
        let mesh = config.resolved_mesh();
        let device = self.device()?;
        let profile = self.profile.as_deref().map(Profile::read).transpose()?;
        let (network, network_told) = self.network(&config, device, profile.as_ref())?;
        let (speed, speed_told) = self.speed(&config, device, profile.as_ref(), &model)?;
        let num_users = config.world_size.min(self.gpus_per_node) as u64;
        let (tiers, tiers_told) = self.tiers.rates(&config, device, profile.as_ref(), num_users)?;
        let memory = self.device_memory.or(device.map(|device| device.memory_bytes));
        let params = grouped(model.shape.parameter_len());
        let mut told = vec![
            ("model", format!("{params} parameters: {}", model.told)),
            ("training", model.training.clone()),
            ("ranks", format!("{}: {mesh}", config.world_size)),
        ];
        told.extend(network_told);
        told.extend(speed_told);
        told.extend(tiers_told);
        let micro_batches = config.training.gradient_accumulation;
        let depths = (config.prefetch.forward, config.prefetch.backward);
        told.push(("settings", format!("prefetch {} and {}, {micro_batches} micro-batches", depths.0, depths.1)));
        let machine = Machine { network, speed };
        let job = Job {
            tiers,
            optimizer: model.optimizer,
            num_tokens: model.num_tokens,
            recompute: model.recompute,
            activation_bytes: model.activations.map(|activations| activations.begin_bytes),
            last_unit_bytes: model.activations.map_or(0, |activations| activations.last_bytes),
            // Profiles are of ranks that are threads of one process.
            ranks_per_process: if self.profile.is_some() { config.world_size as u64 } else { 1 },
            ..Job::configured(model.shape, &config, machine)
        };
        Ok(Setting { config, job, device_bytes: memory, told })
    }

    fn config(&self) -> Result<Config, Box<dyn Error>> {
        let mut config = match &self.config {
            Some(file) => Config::load(file)?,
            None if self.gpus.is_none() => {
                return Err("the number of ranks is not given; add --gpus N, or --config FILE with a world_size".into());
            }
            None => Config::default(),
        };
        if let Some(gpus) = self.gpus.filter(|&gpus| gpus != config.world_size) {
            (config.world_size, config.mesh) = (gpus, None);
        }
        if let Some(copies) = self.replicate {
            let ranks = config.world_size;
            if !ranks.is_multiple_of(copies) {
                return Err(format!("--replicate: {copies} copies do not divide {ranks} ranks; take a divisor").into());
            }
            config.mesh = Some(Mesh::new([(Axis::Replicate, copies), (Axis::Shard, ranks / copies)])?);
        }
        self.tiers.place(&mut config);
        if config.world_size > MOST_RANKS {
            let most = grouped(MOST_RANKS as u64);
            return Err(format!("`world_size` is {}; at most {most} ranks are simulated", config.world_size).into());
        }
        // A plan looks at all stages, and offloads parameters where there are blocks of them.
        Config { stage: Stage::Parameters, ..config.clone() }.validate()?;
        Ok(config)
    }

    fn device(&self) -> Result<Option<Device>, Box<dyn Error>> {
        let name = match (&self.device, &self.profile) {
            (Some(name), _) => name.as_str(),
            (None, Some(_)) => return Ok(None),
            (None, None) => "H100",
        };
        let known = Device::ALL.map(|device| device.name).join(", ");
        match Device::find(name) {
            Some(device) => Ok(Some(device)),
            None => {
                Err(format!("--device: `{name}` is not known; take one of {known}, or --device-memory and --flops")
                    .into())
            }
        }
    }

    fn network(
        &self,
        config: &Config,
        device: Option<Device>,
        profile: Option<&Profile>,
    ) -> Result<(Collectives, Told), Box<dyn Error>> {
        if let Some((file, profile)) = self.profile.as_ref().zip(profile) {
            let Link { alpha_s, beta_s_per_byte } = profile.collectives.all_gather;
            let told = format!(
                "gathers of {} + {}, as {} measured {} ranks",
                seconds(alpha_s),
                rate(1.0 / beta_s_per_byte, "B"),
                file.display(),
                profile.num_ranks
            );
            let num_threads = config.compute_threads(profile.num_cores);
            let shared = format!("{} shared by all ranks, {num_threads} compute threads each", profile.num_cores);
            let mut network = profile.network(config.world_size, num_threads);
            let mut all_told = vec![("collectives", told)];
            match &mut network {
                // A device of its own computes, and the processors are free for what is sent.
                Collectives::Measured { taken_share, .. } if self.device.is_some() => *taken_share = 0.0,
                _ => all_told.push(("processors", shared)),
            }
            return Ok((network, all_told));
        }
        let default = device.map_or("nvlink4", |device| device.link);
        let in_node = named("--link", self.link.as_deref().unwrap_or(default))?;
        let between = named("--node-link", &self.node_link)?;
        let changed = |link: Link, alpha_us: Option<f64>, gb_s: Option<f64>| Link {
            alpha_s: alpha_us.map_or(link.alpha_s, |micros| micros * 1e-6),
            beta_s_per_byte: gb_s.map_or(link.beta_s_per_byte, |gb_s| 1e-9 / gb_s),
        };
        let network = Network {
            in_node: changed(in_node.link, self.alpha_us, self.bandwidth),
            between: changed(between.link, self.node_alpha_us, self.node_bandwidth),
            ranks_per_node: self.gpus_per_node as u64,
        };
        let told = |link: Link, named: NamedLink| {
            let source =
                if link == named.link { format!("{} ({})", named.name, named.source) } else { "as given".into() };
            format!("{} and {}: {source}", seconds(link.alpha_s), rate(1.0 / link.beta_s_per_byte, "B"))
        };
        let lines = vec![
            ("in a node", format!("{} GPUs, {}", self.gpus_per_node, told(network.in_node, in_node))),
            ("between", told(network.between, between)),
        ];
        Ok((network.into(), lines))
    }

    fn speed(
        &self,
        config: &Config,
        device: Option<Device>,
        profile: Option<&Profile>,
        model: &Model,
    ) -> Result<(Speed, Told), Box<dyn Error>> {
        if let (Some(pass_s), Some(optimizer_s)) = (self.pass_s, self.optimizer_s) {
            let told = format!("{} a micro-batch and {} a step, measured", seconds(pass_s), seconds(optimizer_s));
            return Ok((Speed::Measured { pass_s, optimizer_s }, vec![("one rank", told)]));
        }
        // A device or a rate that is given counts more than what a profile has measured.
        let is_given = self.flops.is_some() || self.device.is_some();
        if let Some(step) = profile.and_then(|profile| profile.step.as_ref()).filter(|_| !is_given) {
            return step_of(step, config, model);
        }
        let is_half = config.precision.parameters.size_bytes() == 2;
        let peak = |device: Device| if is_half { device.flops_16 } else { device.flops_32 };
        let flops_per_s = match (self.flops, device) {
            (Some(flops), _) => flops,
            (None, Some(device)) => self.mfu * peak(device),
            (None, None) => {
                return Err(
                    "with --profile, the speed of a rank is not known; measure it with `fsdp bench --report`, or add \
                            --pass-s with --optimizer-s, or --flops, or --device"
                        .into(),
                );
            }
        };
        let memory_bytes_per_s = match (profile, device) {
            (_, Some(device)) => device.memory_bytes_per_s,
            (Some(profile), None) => profile.memory_bytes_per_s,
            (None, None) => f64::INFINITY,
        };
        let mut told = Vec::new();
        if let Some(device) = device {
            let size = device.memory_bytes as f64 / 1e9;
            told.push(("device", format!("{}, {size} GB ({})", device.name, device.source)));
        }
        let share = match (self.flops, device) {
            (None, Some(device)) => format!(" ({}% of {})", 100.0 * self.mfu, rate(peak(device), "FLOP")),
            _ => String::new(),
        };
        told.push(("computes", format!("{}{share}", rate(flops_per_s, "FLOP"))));
        Ok((Speed::Rate { flops_per_s, memory_bytes_per_s }, told))
    }
}

/// A step that was measured, for as many tokens as the model is given.
fn step_of(step: &MeasuredStep, config: &Config, model: &Model) -> Result<(Speed, Told), Box<dyn Error>> {
    let len = model.shape.parameter_len();
    if step.parameter_len != len {
        return Err(format!(
            "the step in the profile is of a model with {} parameters, and this one has {}; measure this one with `fsdp bench \
             --report`, or give --pass-s with --optimizer-s",
            grouped(step.parameter_len),
            grouped(len)
        )
        .into());
    }
    let (pass_s, optimizer_s) = step.among(config.world_size, config.compute_threads(step.num_cores as usize));
    let pass_s = pass_s * model.num_tokens as f64 / step.num_tokens as f64;
    let told = format!(
        "{} a micro-batch of {} tokens and {} a step of all parameters, among the others; alone {} and {}, as measured",
        seconds(pass_s),
        grouped(model.num_tokens),
        seconds(optimizer_s),
        seconds(step.pass.wall_s * model.num_tokens as f64 / step.num_tokens as f64),
        seconds(step.optimizer.wall_s),
    );
    Ok((Speed::Measured { pass_s, optimizer_s }, vec![("one rank", told)]))
}

/// Refuses what would take hours: the schedule looks at all units whenever one is used.
fn check_work(config: &Config, num_units: usize) -> Result<(), Box<dyn Error>> {
    const MOST_WORK: usize = 200_000_000;
    let micro_batches = config.training.gradient_accumulation;
    let work = num_units.max(1000).saturating_mul(num_units).saturating_mul(micro_batches);
    if work > MOST_WORK {
        let most = (MOST_WORK / num_units.max(1000) / num_units.max(1)).max(1);
        return Err(format!(
            "{} micro-batches of {} units are too many to simulate; set `training.gradient_accumulation` to at most {most}, or \
             put more into a unit",
            grouped(micro_batches as u64),
            grouped(num_units as u64)
        )
        .into());
    }
    Ok(())
}

fn named(option: &str, name: &str) -> Result<NamedLink, Box<dyn Error>> {
    let known = NamedLink::ALL.map(|link| link.name).join(", ");
    NamedLink::find(name).ok_or_else(|| {
        let own =
            if option == "--link" { "--alpha-us with --bandwidth" } else { "--node-alpha-us with --node-bandwidth" };
        format!("{option}: `{name}` is not known; take one of {known}, or give {own}").into()
    })
}
