//! The configuration of a run: plain fields, read strictly from TOML or JSON, and printed with every default.
//!
//! The keys are one table (`keys.rs`): reading, checking, printing and documentation all go through it, so a key cannot
//! be accepted without meaning anything.

mod choice;
mod deepspeed;
mod device;
mod error;
mod keys;
mod nearest;
mod offload;
mod print;
mod read;
mod tree;

use std::path::Path;
use std::time::Duration;

pub use choice::{Accumulate, Buffers, Exchange, GradientReduction, NonFinite};
pub use deepspeed::{Fate, Translated, TranslatedItem};
pub use device::DeviceChoice;
pub use error::{ConfigError, Location, Place};
pub use keys::{ConfigKey, config_keys};
pub use offload::{OffloadConfig, TierShares};

use crate::{Axis, Dtype, Environment, LauncherChoice, LauncherError, LossScale, Mesh, Stage, Started};

/// How a run is sharded, and how it trains. [`config_keys`] explains every key of the file.
///
/// Unknown keys are errors that name the nearest key, the file and the place:
///
/// ```
/// use fsdp_core::Config;
///
/// let text = "stage = 2\nworld_size = 4\n[training]\ngradient_clip_nrom = 1.0\n";
/// assert_eq!(
///     Config::from_toml(text, "zero2.toml").unwrap_err().to_string(),
///     "zero2.toml:4:1: unknown key `training.gradient_clip_nrom`; did you mean `gradient_clip_norm`?"
/// );
///
/// let config = Config::from_toml(&text.replace("nrom", "norm"), "zero2.toml")?;
/// assert_eq!(config.training.gradient_clip_norm, Some(1.0));
/// assert_eq!(config.prefetch.forward, 1);
/// // What is printed is complete, and reads back as the same configuration.
/// assert_eq!(Config::from_toml(&config.to_toml(), "printed")?, config);
/// # Ok::<(), fsdp_core::ConfigError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// How much is sharded. Default: stage 3.
    pub stage: Stage,
    /// Number of ranks. Default: 1, which leaves it to a launcher that has started several processes.
    pub world_size: usize,
    /// Who has started the ranks. Default: whoever is found, else they are threads of this process.
    pub launcher: LauncherChoice,
    /// Port at which rank 0 waits for other processes. Default: `None`, the launcher's.
    pub rendezvous_port: Option<u16>,
    /// What ranks compute on. Default: the processor, with Burn's Flex backend.
    pub device: DeviceChoice,
    /// By which way ranks on devices exchange parameters and gradients. Default: through host memory.
    pub collectives: Exchange,
    /// The ranks as a grid whose sizes multiply to the world size. Default: `None`, all ranks along the shard axis.
    pub mesh: Option<Mesh>,
    /// Ranks along the shard axis that a unit stays cut over from forward to backward, at stage 3; they divide the axis.
    /// Backward gathers among them, as with FSDP2's `reshard_after_forward=k` and ZeRO++'s hpZ. Default: `None`, all of the
    /// axis, and nothing is held in between.
    pub reshard_after_forward: Option<usize>,
    /// Every wait of a collective ends after this many seconds. Default: 300.
    pub timeout_s: f64,
    /// Compute threads of each rank; 0 shares the cores evenly. Default: 0. See [`Config::compute_threads`].
    pub threads_per_rank: usize,
    /// Seed of the initial weights and of each rank's random numbers. Default: `None`, another one in every run.
    pub seed: Option<usize>,
    /// Gathers ahead of use.
    pub prefetch: PrefetchConfig,
    /// Element types.
    pub precision: PrecisionConfig,
    /// What happens to gradients.
    pub training: TrainingConfig,
    /// What lies below the device's memory.
    pub offload: OffloadConfig,
}

/// How far ahead of the unit that computes others are gathered. Each costs the largest unit's full size in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefetchConfig {
    /// In forward. Default: 1.
    pub forward: usize,
    /// In backward. Default: 1.
    pub backward: usize,
    /// No unit is gathered ahead where all that are gathered would be larger than this, in bytes. Default: `None`, no
    /// limit.
    pub max_bytes: Option<usize>,
}

/// In which element types a model computes and communicates. Parameters of float32 keep their values, and the optimizer its
/// state, in float32 whatever is set here; those of float64 are left alone. Names of FSDP2's `MixedPrecisionPolicy`:
/// `param_dtype`, `reduce_dtype`, `output_dtype`.
#[derive(Clone, Debug, PartialEq)]
pub struct PrecisionConfig {
    /// What parameters are gathered in and computed with. Default: float32.
    pub parameters: Dtype,
    /// What gradients are sent in; they are added up in float32. Default: float32.
    pub reduce: Dtype,
    /// What `ShardedModel::cast_output` makes of a model's output. Default: float32.
    pub output: Dtype,
    /// How the loss is scaled. Default: `None`, dynamic where `parameters` or `reduce` is f16, else not at all.
    pub loss_scale: Option<LossScale>,
}

/// What happens to gradients between backward and the optimizer's update.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingConfig {
    /// Micro-batches per optimizer step. Default: 1.
    pub gradient_accumulation: usize,
    /// When micro-batches are reduced. Default: [`Accumulate::Reduced`].
    pub accumulate: Accumulate,
    /// Mean or sum over the ranks. Default: [`GradientReduction::Mean`].
    pub gradient_reduction: GradientReduction,
    /// Largest global norm of the gradients, over all parameters of all ranks. Default: `None`, no clipping.
    pub gradient_clip_norm: Option<f64>,
    /// The order p of that norm, (Σ|g|^p)^(1/p), at least 1; infinity for the largest magnitude. Default: 2.
    pub gradient_norm_order: f64,
    /// Largest magnitude of each element of the gradients: what is beyond it is cut off. Default: `None`, no clipping.
    pub gradient_clip_value: Option<f64>,
    /// What to do when the global gradient norm is NaN or infinite. Default: [`NonFinite::Error`].
    pub non_finite: NonFinite,
    /// Whose running statistics the ranks go on with. Default: [`Buffers::Sync`], the mean of all.
    pub buffers: Buffers,
}

impl TrainingConfig {
    /// Whether every step asks for the norm of all gradients: to clip by it, or to find what is not finite.
    pub fn needs_norm(&self) -> bool {
        self.gradient_clip_norm.is_some() || self.non_finite != NonFinite::Propagate
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            stage: Stage::default(),
            world_size: 1,
            launcher: LauncherChoice::default(),
            rendezvous_port: None,
            device: DeviceChoice::default(),
            collectives: Exchange::default(),
            mesh: None,
            reshard_after_forward: None,
            timeout_s: 300.0,
            threads_per_rank: 0,
            seed: None,
            prefetch: PrefetchConfig::default(),
            precision: PrecisionConfig::default(),
            training: TrainingConfig::default(),
            offload: OffloadConfig::default(),
        }
    }
}

impl Default for PrefetchConfig {
    fn default() -> Self {
        Self { forward: 1, backward: 1, max_bytes: None }
    }
}

impl Default for PrecisionConfig {
    fn default() -> Self {
        Self { parameters: Dtype::F32, reduce: Dtype::F32, output: Dtype::F32, loss_scale: None }
    }
}

impl PrecisionConfig {
    /// [`PrecisionConfig::loss_scale`], or what stands in for it.
    pub fn resolved_loss_scale(&self) -> Option<LossScale> {
        let is_half = self.parameters == Dtype::F16 || self.reduce == Dtype::F16;
        self.loss_scale.or(is_half.then_some(LossScale::Dynamic))
    }
}

impl Default for TrainingConfig {
    fn default() -> Self {
        Self {
            gradient_accumulation: 1,
            accumulate: Accumulate::default(),
            gradient_reduction: GradientReduction::default(),
            gradient_clip_norm: None,
            gradient_norm_order: 2.0,
            gradient_clip_value: None,
            non_finite: NonFinite::default(),
            buffers: Buffers::default(),
        }
    }
}

impl Config {
    /// Reads a `.toml` or `.json` file. An empty TOML file means all defaults.
    ///
    /// # Errors
    /// Where the file cannot be read, its name ends differently, or its content is refused: see [`Config::from_toml`].
    pub fn load(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let file = path.as_ref();
        let read = match file.extension().and_then(|extension| extension.to_str()) {
            Some("toml") => Self::from_toml,
            Some("json") => Self::from_json,
            _ => return Err(ConfigError::UnknownFormat { file: file.to_owned() }),
        };
        let text =
            std::fs::read_to_string(file).map_err(|source| ConfigError::Read { file: file.to_owned(), source })?;
        read(&text, &file.display().to_string())
    }

    /// Reads TOML. `origin` is the file name, or whatever else errors should call the text.
    ///
    /// # Errors
    /// At the first mistake in the text: a broken syntax, an unknown or misplaced key, a value of the wrong type or out
    /// of range, or keys that contradict each other.
    pub fn from_toml(text: &str, origin: &str) -> Result<Self, ConfigError> {
        read::read(tree::parse_toml(text, origin)?, origin)
    }

    /// Reads JSON with the same keys and checks as TOML. Errors in keys and values come without line and column.
    ///
    /// # Errors
    /// As [`Config::from_toml`].
    pub fn from_json(text: &str, origin: &str) -> Result<Self, ConfigError> {
        read::read(tree::parse_json(text, origin)?, origin)
    }

    /// Checks values that were set in code, as reading checks those of a file.
    ///
    /// ```
    /// use fsdp_core::Config;
    ///
    /// let config = Config { world_size: 0, ..Config::default() };
    /// assert_eq!(
    ///     config.validate().unwrap_err().to_string(),
    ///     "Config: `world_size` is 0; it must be an integer of at least 1"
    /// );
    /// ```
    ///
    /// # Errors
    /// At the first value that is out of range, or a mesh whose product is not the world size.
    pub fn validate(&self) -> Result<(), ConfigError> {
        read::validate(self)
    }

    /// The configuration as TOML, with every key, its meaning, its cost and its value, defaults included. A valid
    /// configuration reads back equal; optional keys that are not set come as comments.
    pub fn to_toml(&self) -> String {
        print::to_toml(self)
    }

    /// The mesh, or all ranks along the shard axis where none is set.
    ///
    /// # Panics
    /// If no mesh is set and the world size is 0, which [`Config::validate`] refuses.
    pub fn resolved_mesh(&self) -> Mesh {
        self.mesh.clone().unwrap_or_else(|| Mesh::one_dim(self.world_size))
    }

    /// [`Config::reshard_after_forward`], where it is fewer than all ranks along the shard axis.
    ///
    /// # Panics
    /// As [`Config::resolved_mesh`].
    pub fn resharding(&self) -> Option<usize> {
        let num_shards = self.resolved_mesh().size(Axis::Shard);
        self.reshard_after_forward.filter(|&num_ranks| num_ranks < num_shards)
    }

    /// How the ranks of this configuration are started, by the environment of this process.
    ///
    /// # Errors
    /// See [`Started::find`].
    pub fn started(&self) -> Result<Started, LauncherError> {
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        self.started_in(&std::env::vars_os().filter_map(text).collect())
    }

    /// As [`Config::started`], for a given environment.
    ///
    /// # Errors
    /// See [`Started::find`].
    pub fn started_in(&self, variables: &Environment) -> Result<Started, LauncherError> {
        Started::find(variables, self.launcher, self.world_size, self.rendezvous_port)
    }

    /// This configuration with the world size that the launcher has decided.
    #[must_use]
    pub fn for_started(&self, started: &Started) -> Self {
        let world_size = match started {
            Started::Threads => self.world_size,
            Started::Process(process) => process.world_size,
        };
        Self { world_size, ..self.clone() }
    }

    /// [`Config::timeout_s`] as a duration.
    ///
    /// # Panics
    /// If it is negative, NaN or beyond a duration's range, which [`Config::validate`] refuses.
    pub fn timeout(&self) -> Duration {
        Duration::from_secs_f64(self.timeout_s)
    }

    /// Compute threads of each rank on a machine of `num_cores` cores: [`Config::threads_per_rank`], or where that is
    /// 0 an even share, at least 1.
    pub fn compute_threads(&self, num_cores: usize) -> usize {
        match self.threads_per_rank {
            0 => (num_cores / self.world_size.max(1)).max(1),
            num_threads => num_threads,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;
    use crate::Launcher;

    #[test]
    fn an_empty_file_means_all_defaults() {
        for text in ["", "\n# nothing yet\n"] {
            assert_eq!(Config::from_toml(text, "empty.toml").unwrap(), Config::default());
        }
        assert_eq!(Config::from_json("{}", "empty.json").unwrap(), Config::default());
        Config::default().validate().unwrap();
    }

    #[test]
    fn toml_and_json_of_every_key_agree() {
        let toml = r#"
            stage = 3
            world_size = 8
            launcher = "torchrun"
            rendezvous_port = 4000
            device = "cuda:3"
            collectives = "host"
            mesh = { shard = 4, replicate = 2 }
            reshard_after_forward = 2
            timeout_s = 2.5
            threads_per_rank = 2
            seed = 0
            prefetch = { forward = 0, backward = 3, max_bytes = 65_536 }
            precision = { parameters = "f16", reduce = "bf16", output = "bf16", loss_scale = 128 }
            [training]
            gradient_accumulation = 4
            accumulate = "local"
            gradient_reduction = "sum"
            gradient_clip_norm = 1
            gradient_norm_order = "inf"
            non_finite = "skip"
            buffers = "rank 0"
            [offload]
            optimizer = { nvme = 0.75, cpu = 0.25 }
            gradients = "cpu"
            nvme_path = "/nvme/run \"1\""
            nvme_buffer_bytes = 8192
            nvme_block_bytes = 4096
            nvme_checksums = false
        "#;
        let json = r#"{
            "stage": 3, "world_size": 8, "launcher": "torchrun", "rendezvous_port": 4000,
            "device": "cuda:3", "collectives": "host",
            "mesh": {"shard": 4, "replicate": 2}, "reshard_after_forward": 2, "timeout_s": 2.5,
            "threads_per_rank": 2, "seed": 0, "prefetch": {"forward": 0, "backward": 3, "max_bytes": 65536},
            "precision": {"parameters": "f16", "reduce": "bf16", "output": "bf16", "loss_scale": 128},
            "training": {"gradient_accumulation": 4, "accumulate": "local", "gradient_reduction": "sum",
                         "gradient_clip_norm": 1, "gradient_norm_order": "inf", "non_finite": "skip",
                         "buffers": "rank 0"},
            "offload": {"optimizer": {"nvme": 0.75, "cpu": 0.25}, "gradients": "cpu", "nvme_path": "/nvme/run \"1\"",
                        "nvme_buffer_bytes": 8192, "nvme_block_bytes": 4096, "nvme_checksums": false}
        }"#;
        let expected = Config {
            stage: Stage::Parameters,
            world_size: 8,
            launcher: LauncherChoice::Only(Launcher::Torchrun),
            rendezvous_port: Some(4000),
            device: DeviceChoice::CudaAt(3),
            collectives: Exchange::Host,
            mesh: Some(Mesh::new([(Axis::Shard, 4), (Axis::Replicate, 2)]).unwrap()),
            reshard_after_forward: Some(2),
            timeout_s: 2.5,
            threads_per_rank: 2,
            seed: Some(0),
            prefetch: PrefetchConfig { forward: 0, backward: 3, max_bytes: Some(65_536) },
            precision: PrecisionConfig {
                parameters: Dtype::F16,
                reduce: Dtype::Bf16,
                output: Dtype::Bf16,
                loss_scale: Some(LossScale::Fixed(128.0)),
            },
            training: TrainingConfig {
                gradient_accumulation: 4,
                accumulate: Accumulate::Local,
                gradient_reduction: GradientReduction::Sum,
                gradient_clip_norm: Some(1.0),
                gradient_norm_order: f64::INFINITY,
                gradient_clip_value: None,
                non_finite: NonFinite::Skip,
                buffers: Buffers::Rank0,
            },
            offload: OffloadConfig {
                optimizer: TierShares { cpu: 0.25, nvme: 0.75 },
                gradients: TierShares::CPU,
                parameters: TierShares::DEVICE,
                nvme_path: Some("/nvme/run \"1\"".to_owned()),
                nvme_buffer_bytes: 8192,
                nvme_block_bytes: 4096,
                nvme_checksums: false,
            },
        };
        assert_eq!(Config::from_toml(toml, "t").unwrap(), expected);
        assert_eq!(Config::from_json(json, "t").unwrap(), expected);
        assert_eq!(expected.timeout(), Duration::from_millis(2500));
    }

    #[test]
    fn load_reads_by_the_name_of_the_file() {
        let folder = std::env::temp_dir().join(format!("fsdp-core-config-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (toml, json) = (folder.join("run.toml"), folder.join("run.json"));
        fs::write(&toml, "world_size = 3").unwrap();
        fs::write(&json, "{\"world_size\": 5}").unwrap();
        assert_eq!(Config::load(&toml).unwrap().world_size, 3);
        assert_eq!(Config::load(&json).unwrap().world_size, 5);
        fs::remove_dir_all(&folder).unwrap();

        let missing = Config::load(&toml).unwrap_err();
        assert!(matches!(&missing, ConfigError::Read { file, .. } if *file == toml));
        assert_eq!(
            missing.to_string(),
            format!(
                "cannot read the configuration {}: No such file or directory (os error 2); pass the path of a TOML or \
                 JSON file (an empty .toml file means all defaults)",
                toml.display()
            )
        );
        assert_eq!(
            Config::load("run.yaml").unwrap_err().to_string(),
            "run.yaml: a configuration is TOML or JSON; let the name of the file end in .toml or .json"
        );
    }

    #[test]
    fn threads_are_shared_evenly_unless_given() {
        let config = |world_size, threads_per_rank| Config { world_size, threads_per_rank, ..Config::default() };
        assert_eq!(config(4, 0).compute_threads(10), 2);
        assert_eq!(config(4, 0).compute_threads(2), 1);
        assert_eq!(config(4, 7).compute_threads(2), 7);
    }

    #[test]
    fn the_mesh_defaults_to_all_ranks_along_the_shard_axis() {
        let config = Config { world_size: 5, ..Config::default() };
        assert_eq!(config.resolved_mesh(), Mesh::one_dim(5));
    }

    prop_compose! {
        fn any_placement()(kind in 0..5u8, share in 0.0..=1.0f64, part in 0.0..=1.0f64) -> TierShares {
            match kind {
                0 => TierShares::DEVICE,
                1 => TierShares::CPU,
                2 => TierShares::NVME,
                3 => TierShares { cpu: 0.0, nvme: share },
                _ => TierShares { cpu: share * part, nvme: share * (1.0 - part) },
            }
        }
    }

    prop_compose! {
        fn any_offload()(
            (optimizer, gradients, parameters) in (any_placement(), any_placement(), any_placement()),
            nvme_path in "/[ -~é]{0,20}",
            (num_blocks, num_pages, nvme_checksums) in (2..100usize, 1..100usize, any::<bool>()),
        ) -> OffloadConfig {
            OffloadConfig {
                optimizer,
                gradients,
                parameters,
                nvme_path: Some(nvme_path),
                nvme_buffer_bytes: num_blocks * num_pages * 4096,
                nvme_block_bytes: num_pages * 4096,
                nvme_checksums,
            }
        }
    }

    prop_compose! {
        fn any_config()(
            stage in 0..4usize,
            (replicate, shard, mesh) in (1..5usize, 1..9usize, 0..4u8),
            (launcher, rendezvous_port) in (0..5usize, proptest::option::of(1..u16::MAX)),
            device in prop_oneof![
                (0..3usize).prop_map(|index| DeviceChoice::named(DeviceChoice::NAMES[index]).unwrap()),
                any::<u16>().prop_map(DeviceChoice::CudaAt),
            ],
            collectives in 0..3usize,
            (timeout_s, threads_per_rank) in (0.001..1e9, 0..100usize),
            seed in proptest::option::of(0..1usize << 62),
            (forward, backward) in (0..10usize, 0..10usize),
            max_bytes in proptest::option::of(1..1usize << 40),
            (parameters, reduce, output) in (0..3usize, 0..3usize, 0..3usize),
            loss_scale in proptest::option::of(prop_oneof![
                Just(LossScale::Dynamic), (1e-30..1e30f64).prop_map(LossScale::Fixed)
            ]),
            gradient_accumulation in 1..100usize,
            (accumulate, reduction, non_finite, buffers) in (0..2usize, 0..2usize, 0..3usize, 0..3usize),
            (clipping, most) in (0..3u8, 1e-30..1e30f64),
            gradient_norm_order in prop_oneof![Just(f64::INFINITY), 1.0..20.0f64],
            offload in any_offload(),
        ) -> Config {
            // Whole parameters are not offloaded.
            let blocks = if stage == 3 { offload.parameters } else { TierShares::DEVICE };
            let mesh = match mesh {
                0 => None,
                1 => Some(vec![(Axis::Replicate, replicate), (Axis::Shard, shard)]),
                2 => Some(vec![(Axis::Shard, shard), (Axis::Replicate, replicate)]),
                _ => Some(vec![(Axis::Shard, replicate * shard)]),
            };
            let mesh = mesh.map(|axes| Mesh::new(axes).unwrap());
            let on_device = device != DeviceChoice::Flex && collectives > 0;
            let num_shards = mesh.as_ref().map_or(replicate * shard, |mesh| mesh.size(Axis::Shard));
            Config {
                stage: Stage::ALL[stage],
                world_size: replicate * shard,
                launcher: LauncherChoice::ALL[launcher],
                rendezvous_port,
                device,
                collectives: Exchange::ALL[if on_device { collectives } else { 0 }],
                mesh,
                // The largest true divisor, if there is one.
                reshard_after_forward: (2..num_shards).rev().find(|k| stage == 3 && num_shards.is_multiple_of(*k)),
                timeout_s,
                threads_per_rank,
                seed,
                prefetch: PrefetchConfig { forward, backward, max_bytes },
                precision: PrecisionConfig {
                    parameters: Dtype::ALL[parameters],
                    reduce: Dtype::ALL[reduce],
                    output: Dtype::ALL[output],
                    loss_scale,
                },
                training: TrainingConfig {
                    gradient_accumulation,
                    accumulate: Accumulate::ALL[accumulate],
                    gradient_reduction: GradientReduction::ALL[reduction],
                    gradient_clip_norm: (clipping == 1).then_some(most),
                    gradient_norm_order,
                    gradient_clip_value: (clipping == 2).then_some(most),
                    non_finite: NonFinite::ALL[non_finite],
                    buffers: Buffers::ALL[buffers],
                },
                offload: OffloadConfig { parameters: blocks, ..offload },
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_valid_configuration_reads_back_equal_and_prints_the_same(config in any_config()) {
            config.validate().unwrap();
            let printed = config.to_toml();
            let read = Config::from_toml(&printed, "printed").unwrap();
            prop_assert_eq!(&read, &config);
            prop_assert_eq!(read.to_toml(), printed);
        }
    }
}
