//! Every key of the configuration file: where it is, what it takes, what it means and what it costs.

use super::choice::{Accumulate, Buffers, Exchange, GradientReduction, NonFinite};
use super::device::DeviceChoice;
use super::offload::TierShares;
use super::{Config, print};
use crate::{Dtype, LauncherChoice, LossScale, Mesh, Stage};

/// One key. [`config_keys`] lists them all.
#[derive(Debug)]
pub struct ConfigKey {
    /// The table that holds the key, as `training` in `[training]`; empty for keys at the top.
    pub table: &'static str,
    /// The name in the table.
    pub name: &'static str,
    /// What it sets.
    pub meaning: &'static str,
    /// What it costs in memory, traffic or time.
    pub cost: &'static str,
    pub(super) kind: Kind,
}

/// What a key takes, and which field of [`Config`] it is.
#[derive(Debug)]
pub(super) enum Kind {
    /// An integer from `min`, to `max` where there is one.
    Integer { min: usize, max: Option<usize>, get: fn(&Config) -> usize, set: fn(&mut Config, usize) },
    /// An integer from `min`, to `max` where there is one, or nothing.
    OptionalInteger {
        min: usize,
        max: Option<usize>,
        get: fn(&Config) -> Option<usize>,
        set: fn(&mut Config, Option<usize>),
    },
    /// A number from `min` to `max`, of `unit`.
    Number { min: f64, max: f64, unit: &'static str, get: fn(&Config) -> f64, set: fn(&mut Config, f64) },
    /// A positive finite number, or nothing.
    OptionalPositive { get: fn(&Config) -> Option<f64>, set: fn(&mut Config, Option<f64>) },
    /// A positive finite number, or the text "dynamic", or nothing.
    OptionalScale { get: fn(&Config) -> Option<LossScale>, set: fn(&mut Config, Option<LossScale>) },
    /// The order of a norm: a number of at least 1, or the text "inf".
    NormOrder { get: fn(&Config) -> f64, set: fn(&mut Config, f64) },
    /// One of `names`, by its index.
    Choice { names: &'static [&'static str], get: fn(&Config) -> usize, set: fn(&mut Config, usize) },
    /// A kind of device.
    Device { get: fn(&Config) -> DeviceChoice, set: fn(&mut Config, DeviceChoice) },
    /// Yes or no.
    Flag { get: fn(&Config) -> bool, set: fn(&mut Config, bool) },
    /// A path, or nothing.
    OptionalPath { get: fn(&Config) -> Option<&str>, set: fn(&mut Config, Option<String>) },
    /// A tier, or a table of shares.
    Tiers { get: fn(&Config) -> TierShares, set: fn(&mut Config, TierShares) },
    /// A table of axes, or nothing.
    OptionalMesh { get: fn(&Config) -> Option<&Mesh>, set: fn(&mut Config, Option<Mesh>) },
}

impl ConfigKey {
    /// The key with its table: `training.accumulate`.
    pub fn path(&self) -> String {
        if self.table.is_empty() { self.name.to_owned() } else { format!("{}.{}", self.table, self.name) }
    }

    /// What it takes: "an integer from 0 to 3".
    pub fn allowed(&self) -> String {
        match &self.kind {
            Kind::Integer { min, max: Some(max), .. } => format!("an integer from {min} to {max}"),
            Kind::Integer { min, max: None, .. } => format!("an integer of at least {min}"),
            Kind::Number { min, max, unit, .. } => format!("a number from {min} to {max:e} {unit}"),
            Kind::OptionalInteger { min, max: Some(max), .. } => {
                format!("an integer from {min} to {max}; leave the key out for none")
            }
            Kind::OptionalInteger { min, max: None, .. } => {
                format!("an integer of at least {min}; leave the key out for none")
            }
            Kind::OptionalPositive { .. } => "a positive finite number; leave the key out for none".to_owned(),
            Kind::OptionalScale { .. } => {
                "\"dynamic\" or a positive finite number; leave the key out for the default".to_owned()
            }
            Kind::NormOrder { .. } => "a number of at least 1, or \"inf\"".to_owned(),
            Kind::Choice { names, .. } => format!("\"{}\"", names.join("\" or \"")),
            Kind::Device { .. } => {
                "\"flex\", \"cpu\", \"cuda\", or \"cuda:0\" with the number of a GPU from 0 to 65535".to_owned()
            }
            Kind::Flag { .. } => "true or false".to_owned(),
            Kind::OptionalPath { .. } => "a path; leave the key out for none".to_owned(),
            Kind::Tiers { .. } => {
                "\"device\", \"cpu\", \"nvme\", or shares from 0 to 1 that add up to at most 1, such as { nvme = 0.8 }"
                    .to_owned()
            }
            Kind::OptionalMesh { .. } => "a table of axes, such as { replicate = 2, shard = 4 }".to_owned(),
        }
    }

    /// The value in `config` as TOML, or `None` where an optional key is not set.
    pub fn value(&self, config: &Config) -> Option<String> {
        print::value(&self.kind, config)
    }

    /// The default as TOML, or `None` for an optional key.
    pub fn default_value(&self) -> Option<String> {
        self.value(&Config::default())
    }
}

/// All keys, table by table, in the order in which they are printed.
///
/// ```
/// let key = fsdp_core::config_keys().iter().find(|key| key.path() == "training.accumulate").unwrap();
/// assert_eq!(key.allowed(), "\"reduced\" or \"local\"");
/// assert_eq!(key.default_value().as_deref(), Some("\"reduced\""));
/// ```
pub fn config_keys() -> &'static [ConfigKey] {
    KEYS
}

static KEYS: &[ConfigKey] = &[
    ConfigKey {
        table: "",
        name: "stage",
        meaning: "How much is sharded: 0 nothing (DDP), 1 optimizer state, 2 gradients too, 3 parameters too (FSDP).",
        cost: "Stage 3 sends 1.5 times what stages 0 to 2 send.",
        kind: Kind::Integer {
            min: 0,
            max: Some(Stage::ALL.len() - 1),
            get: |config| config.stage.number().into(),
            set: |config, number| config.stage = Stage::ALL[number],
        },
    },
    ConfigKey {
        table: "",
        name: "world_size",
        meaning: "Number of ranks: threads of this process, or one process each where a launcher has started several. There 1 \
                  leaves the number to the launcher, and any other must be the launcher's.",
        cost: "Each rank holds its own activations and its share of the sharded state.",
        kind: Kind::Integer {
            min: 1,
            max: None,
            get: |config| config.world_size,
            set: |config, world_size| config.world_size = world_size,
        },
    },
    ConfigKey {
        table: "",
        name: "launcher",
        meaning: "Who has started the ranks: \"auto\" looks for the variables of mpirun, torchrun and srun, in this order, and \
                  starts threads where there are none; a name looks for that one only.",
        cost: "Processes send each other what threads share.",
        kind: Kind::Choice {
            names: &LauncherChoice::NAMES,
            get: |config| LauncherChoice::ALL.iter().position(|&choice| choice == config.launcher).unwrap_or(0),
            set: |config, index| config.launcher = LauncherChoice::ALL[index],
        },
    },
    ConfigKey {
        table: "",
        name: "rendezvous_port",
        meaning: "Port at which rank 0 waits for the other processes, until all have come. Not set: MASTER_PORT, or one made from \
                  the number of the SLURM job.",
        cost: "None.",
        kind: Kind::OptionalInteger {
            min: 1,
            max: Some(u16::MAX as usize),
            get: |config| config.rendezvous_port.map(usize::from),
            set: |config, port| config.rendezvous_port = port.and_then(|port| u16::try_from(port).ok()),
        },
    },
    ConfigKey {
        table: "",
        name: "device",
        meaning: "What ranks compute on: \"flex\" the processor; \"cuda\" an NVIDIA GPU each, by their number on the host; \
                  \"cuda:0\" one GPU, by its number, together; \"cpu\" the processor, with the kernels of GPUs, for tests. All \
                  but \"flex\" need the feature of their name (`cuda`, `cpu`) where the program is built.",
        cost: "What a GPU holds between steps, [offload] says; what is copied, `collectives`. \"cpu\" takes many times as long as \
               \"flex\".",
        kind: Kind::Device { get: |config| config.device, set: |config, device| config.device = device },
    },
    ConfigKey {
        table: "",
        name: "collectives",
        meaning: "By which way ranks on devices exchange parameters (stage 3) and gradients: \"host\" through the memory of their \
                  hosts, as ranks on processors do; \"device\" from device to device, between GPUs by NCCL (`libnccl.so`), on a \
                  device that threads share within it; \"device inline\" the same, with NCCL in line with the kernels in place of beside \
                  them, to compare.",
        cost: "\"host\" copies every parameter to each device twice and every gradient back, in a step; \"device\" nothing but \
               what [offload] puts into host memory. NCCL adds in an order of its own.",
        kind: Kind::Choice {
            names: Exchange::NAMES,
            get: |config| config.collectives as usize,
            set: |config, index| config.collectives = Exchange::ALL[index],
        },
    },
    ConfigKey {
        table: "",
        name: "mesh",
        meaning: "The ranks as a grid of the axes `replicate` and `shard`, slowest first; sizes multiply to world_size. \
                  Not set: all ranks along `shard`.",
        cost: "State is cut over `shard` only, so each index of `replicate` holds one more copy.",
        kind: Kind::OptionalMesh { get: |config| config.mesh.as_ref(), set: |config, mesh| config.mesh = mesh },
    },
    ConfigKey {
        table: "",
        name: "reshard_after_forward",
        meaning: "Ranks that a unit stays cut over from forward to backward, at stage 3: neighbours along `shard`, whose number \
                  it divides. Backward gathers among them. Not set: all of `shard`, and nothing stays.",
        cost: "Each rank holds 1/k of the units from forward to backward; the second gather stays among k ranks, such as those \
               of one host.",
        kind: Kind::OptionalInteger {
            min: 2,
            max: None,
            get: |config| config.reshard_after_forward,
            set: |config, num_ranks| config.reshard_after_forward = num_ranks,
        },
    },
    ConfigKey {
        table: "",
        name: "timeout_s",
        meaning: "Seconds after which every wait of a collective ends with an error.",
        cost: "After a rank has failed silently, the others wait at most this long.",
        kind: Kind::Number {
            min: 0.001,
            max: 1e9,
            unit: "seconds",
            get: |config| config.timeout_s,
            set: |config, seconds| config.timeout_s = seconds,
        },
    },
    ConfigKey {
        table: "",
        name: "threads_per_rank",
        meaning: "Compute threads of each rank; 0 means cores / world_size, at least 1.",
        cost: "More than cores / world_size makes ranks compete for cores.",
        kind: Kind::Integer {
            min: 0,
            max: None,
            get: |config| config.threads_per_rank,
            set: |config, num_threads| config.threads_per_rank = num_threads,
        },
    },
    ConfigKey {
        table: "",
        name: "seed",
        meaning: "Seed of the initial weights, which are rank 0's whatever the world size, and of each rank's own stream \
                  of random numbers, from which `fsdp_burn::nn::Dropout` draws. Not set: another one in every run.",
        cost: "None.",
        kind: Kind::OptionalInteger {
            min: 0,
            max: None,
            get: |config| config.seed,
            set: |config, seed| config.seed = seed,
        },
    },
    ConfigKey {
        table: "prefetch",
        name: "forward",
        meaning: "Units gathered ahead of the one that computes, in forward (stage 3).",
        cost: "Each holds up to one more gathered unit in memory.",
        kind: Kind::Integer {
            min: 0,
            max: None,
            get: |config| config.prefetch.forward,
            set: |config, depth| config.prefetch.forward = depth,
        },
    },
    ConfigKey {
        table: "prefetch",
        name: "backward",
        meaning: "Units gathered ahead of the one that computes, in backward (stage 3).",
        cost: "Each holds up to one more gathered unit in memory.",
        kind: Kind::Integer {
            min: 0,
            max: None,
            get: |config| config.prefetch.backward,
            set: |config, depth| config.prefetch.backward = depth,
        },
    },
    ConfigKey {
        table: "prefetch",
        name: "max_bytes",
        meaning: "Gathers ahead of use stop where the gathered units, kept ones included, would be more bytes than this; \
                  the unit in use is always gathered. Not set: no limit.",
        cost: "Time: a unit that is not gathered ahead is waited for.",
        kind: Kind::OptionalInteger {
            min: 1,
            max: None,
            get: |config| config.prefetch.max_bytes,
            set: |config, bytes| config.prefetch.max_bytes = bytes,
        },
    },
    ConfigKey {
        table: "precision",
        name: "parameters",
        meaning: "Element type in which float32 parameters are gathered and computed with; `#[shard(precision)]` sets it \
                  for one unit. The parameters themselves and the optimizer's state stay float32.",
        cost: "\"bf16\" and \"f16\" halve what gathers send and hold, and activations. Below stage 3 parameters are held \
               twice, and the float32 ones are sharded as the optimizer's state is.",
        kind: Kind::Choice {
            names: Dtype::PRECISIONS,
            get: |config| config.precision.parameters as usize,
            set: |config, index| config.precision.parameters = Dtype::ALL[index],
        },
    },
    ConfigKey {
        table: "precision",
        name: "reduce",
        meaning: "Element type in which gradients are sent. They are added up, over ranks and micro-batches, in float32.",
        cost: "\"bf16\" and \"f16\" halve what reductions send, and round each rank's gradient.",
        kind: Kind::Choice {
            names: Dtype::PRECISIONS,
            get: |config| config.precision.reduce as usize,
            set: |config, index| config.precision.reduce = Dtype::ALL[index],
        },
    },
    ConfigKey {
        table: "precision",
        name: "output",
        meaning: "Element type that `ShardedModel::cast_output` gives the model's output, for a loss in full precision.",
        cost: "None.",
        kind: Kind::Choice {
            names: Dtype::PRECISIONS,
            get: |config| config.precision.output as usize,
            set: |config, index| config.precision.output = Dtype::ALL[index],
        },
    },
    ConfigKey {
        table: "precision",
        name: "loss_scale",
        meaning: "What the loss is multiplied with before backward, and gradients divided by after it. \"dynamic\" begins \
                  with 65536, skips a step whose gradients overflow and halves. Not set: \"dynamic\" where `parameters` \
                  or `reduce` is \"f16\", else none.",
        cost: "\"dynamic\" needs the global norm, as clipping does, so no unit is stepped before all are reduced.",
        kind: Kind::OptionalScale {
            get: |config| config.precision.loss_scale,
            set: |config, scale| config.precision.loss_scale = scale,
        },
    },
    ConfigKey {
        table: "training",
        name: "gradient_accumulation",
        meaning: "Micro-batches per optimizer step.",
        cost: "Every micro-batch gathers again at stage 3, and is reduced as `accumulate` says.",
        kind: Kind::Integer {
            min: 1,
            max: None,
            get: |config| config.training.gradient_accumulation,
            set: |config, num_batches| config.training.gradient_accumulation = num_batches,
        },
    },
    ConfigKey {
        table: "training",
        name: "accumulate",
        meaning: "\"reduced\": every micro-batch is reduced, and gradients stay sharded. \"local\": reduced once per step.",
        cost: "\"local\" holds full gradients until the step, 4 bytes per parameter on every rank.",
        kind: Kind::Choice {
            names: Accumulate::NAMES,
            get: |config| config.training.accumulate as usize,
            set: |config, index| config.training.accumulate = Accumulate::ALL[index],
        },
    },
    ConfigKey {
        table: "training",
        name: "gradient_reduction",
        meaning: "Whether the gradients of the ranks become their mean or their sum.",
        cost: "None.",
        kind: Kind::Choice {
            names: GradientReduction::NAMES,
            get: |config| config.training.gradient_reduction as usize,
            set: |config, index| config.training.gradient_reduction = GradientReduction::ALL[index],
        },
    },
    ConfigKey {
        table: "training",
        name: "gradient_clip_norm",
        meaning: "Largest norm of all gradients over all ranks; beyond it they are scaled down. Not set: no clipping.",
        cost: "The global norm: one look at the gradients of each rank, and one all-gather of a number per parameter.",
        kind: Kind::OptionalPositive {
            get: |config| config.training.gradient_clip_norm,
            set: |config, norm| config.training.gradient_clip_norm = norm,
        },
    },
    ConfigKey {
        table: "training",
        name: "gradient_norm_order",
        meaning: "The order of the gradients' norm, for clipping and for what is logged: 2 is the root of the sum of \
                  squares, \"inf\" the largest magnitude.",
        cost: "Orders other than 1, 2 and \"inf\" look at the gradients twice, with an all-gather each time, and compute a \
               power of every one.",
        kind: Kind::NormOrder {
            get: |config| config.training.gradient_norm_order,
            set: |config, order| config.training.gradient_norm_order = order,
        },
    },
    ConfigKey {
        table: "training",
        name: "gradient_clip_value",
        meaning: "Largest magnitude of each element of the gradients; what is beyond it is cut off. Not together with \
                  `gradient_clip_norm`. Not set: no clipping.",
        cost: "One more pass over the gradients of each rank.",
        kind: Kind::OptionalPositive {
            get: |config| config.training.gradient_clip_value,
            set: |config, value| config.training.gradient_clip_value = value,
        },
    },
    ConfigKey {
        table: "training",
        name: "non_finite",
        meaning: "When the global gradient norm is NaN or infinite: \"error\" ends the step with an error, \"skip\" leaves \
                  the update out (both keep the weights), \"propagate\" goes ahead.",
        cost: "\"error\" and \"skip\" need the global norm, as clipping does, so no unit is stepped before all are reduced.",
        kind: Kind::Choice {
            names: NonFinite::NAMES,
            get: |config| config.training.non_finite as usize,
            set: |config, index| config.training.non_finite = NonFinite::ALL[index],
        },
    },
    ConfigKey {
        table: "training",
        name: "buffers",
        meaning: "The running statistics (batch norm) that all ranks go on with after an optimizer step: \"sync\" the mean \
                  over the ranks, \"rank 0\" those of rank 0, \"local\" each rank its own (a checkpoint has rank 0's).",
        cost: "\"sync\": an all-reduce of the statistics per step; \"rank 0\": a broadcast. Models without them: none.",
        kind: Kind::Choice {
            names: Buffers::NAMES,
            get: |config| config.training.buffers as usize,
            set: |config, index| config.training.buffers = Buffers::ALL[index],
        },
    },
    ConfigKey {
        table: "offload",
        name: "optimizer",
        meaning: "Where optimizer state lies between steps: \"device\", \"cpu\" (host memory; on the CPU backend the same place), \
                  \"nvme\" (a file on a disk), or a share of it, such as { nvme = 0.8 }, in whole parameters.",
        cost: "The optimizer steps where its state lies: elsewhere than on a GPU in host memory, to and from which blocks and \
               gradients are copied then. On NVMe each step reads and writes the state once, unit by unit beside the update; three \
               units of it are in memory.",
        kind: Kind::Tiers {
            get: |config| config.offload.optimizer,
            set: |config, placement| config.offload.optimizer = placement,
        },
    },
    ConfigKey {
        table: "offload",
        name: "gradients",
        meaning: "Where reduced gradients wait for the step, in the same words.",
        cost: "On NVMe each is written once and read once, and once more where a norm over all of them is asked for \
               (clipping, `non_finite`) or micro-batches add up.",
        kind: Kind::Tiers {
            get: |config| config.offload.gradients,
            set: |config, placement| config.offload.gradients = placement,
        },
    },
    ConfigKey {
        table: "offload",
        name: "parameters",
        meaning: "Where this rank's blocks of the parameters lie between their gathers, in the same words; at stage 3 only.",
        cost: "On NVMe each gather reads the blocks from the disk, one unit ahead, and each step reads and writes them once.",
        kind: Kind::Tiers {
            get: |config| config.offload.parameters,
            set: |config, placement| config.offload.parameters = placement,
        },
    },
    ConfigKey {
        table: "offload",
        name: "nvme_path",
        meaning: "A directory of the run's own on a local disk: one file per rank, removed at the end. A second run in it is \
                  refused.",
        cost: "As many bytes as are placed there.",
        kind: Kind::OptionalPath {
            get: |config| config.offload.nvme_path.as_deref(),
            set: |config, path| config.offload.nvme_path = path,
        },
    },
    ConfigKey {
        table: "offload",
        name: "nvme_buffer_bytes",
        meaning: "Memory of each rank for blocks on their way to and from the disk; at least two blocks.",
        cost: "As many bytes. Fewer than eight blocks leave a fast disk idle.",
        kind: Kind::Integer {
            min: 2 * 4096,
            max: None,
            get: |config| config.offload.nvme_buffer_bytes,
            set: |config, bytes| config.offload.nvme_buffer_bytes = bytes,
        },
    },
    ConfigKey {
        table: "offload",
        name: "nvme_block_bytes",
        meaning: "Bytes that move to or from the disk at a time, a multiple of 4096.",
        cost: "Small blocks cost processor time, large ones leave less to do side by side.",
        kind: Kind::Integer {
            min: 4096,
            max: Some(1 << 30),
            get: |config| config.offload.nvme_block_bytes,
            set: |config, bytes| config.offload.nvme_block_bytes = bytes,
        },
    },
    ConfigKey {
        table: "offload",
        name: "nvme_checksums",
        meaning: "Whether what is read from the disk is compared with a checksum of what was written.",
        cost: "About 0.1 s of a processor for each GB, in each direction.",
        kind: Kind::Flag {
            get: |config| config.offload.nvme_checksums,
            set: |config, checks| config.offload.nvme_checksums = checks,
        },
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_a_table_stand_together_and_paths_are_unique() {
        let mut tables: Vec<_> = KEYS.iter().map(|key| key.table).collect();
        tables.dedup();
        assert_eq!(tables, ["", "prefetch", "precision", "training", "offload"]);
        let mut paths: Vec<_> = KEYS.iter().map(ConfigKey::path).collect();
        paths.sort_unstable();
        paths.dedup();
        assert_eq!(paths.len(), KEYS.len());
    }

    #[test]
    fn every_key_is_explained() {
        for key in config_keys() {
            assert!(key.meaning.ends_with('.') && key.cost.ends_with('.'), "{}", key.path());
            assert!(!key.allowed().is_empty());
        }
        let optional: Vec<_> = KEYS.iter().filter(|key| key.default_value().is_none()).map(ConfigKey::path).collect();
        assert_eq!(
            optional,
            [
                "rendezvous_port",
                "mesh",
                "reshard_after_forward",
                "seed",
                "prefetch.max_bytes",
                "precision.loss_scale",
                "training.gradient_clip_norm",
                "training.gradient_clip_value",
                "offload.nvme_path"
            ]
        );
    }
}
