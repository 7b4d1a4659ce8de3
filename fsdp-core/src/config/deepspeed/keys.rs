//! DeepSpeed's keys, each with what becomes of it here.

use super::{Translator, apply, offload};
use crate::config::ConfigError;
use crate::config::tree::Value;

/// What becomes of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fate {
    /// It sets something here.
    Set,
    /// The program says it, not the configuration.
    Program,
    /// It is a matter of course here, or without effect on a run.
    NotNeeded,
    /// There is nothing like it: the run differs in it.
    Missing,
}

impl Fate {
    /// All fates.
    pub const ALL: [Fate; 4] = [Fate::Set, Fate::Program, Fate::NotNeeded, Fate::Missing];
}

pub(super) struct Rule {
    /// The path, joined with dots; `section.*` for all that a section may hold.
    pub(super) key: &'static str,
    pub(super) how: How,
}

/// A fate with the words that explain it.
pub(super) type Told = (Fate, String);

pub(super) enum How {
    Set(fn(&mut Translator, &str, &Value) -> Result<Told, ConfigError>),
    Listed(Fate, &'static str),
    /// Missing, unless the value asks for nothing.
    Unless(fn(&Value) -> bool, &'static str),
    /// A table: its keys have rules of their own, or it is listed as a whole.
    Section(bool),
}

use Fate::{Missing, NotNeeded, Program};
use How::{Listed, Section, Set, Unless};

const fn rule(key: &'static str, how: How) -> Rule {
    Rule { key, how }
}

const BUCKET: &str = "a unit is a bucket: its size comes from the model's #[shard(unit)] and #[shard(units)]";
const OVERLAP: &str = "communication runs beside the computation always, with the same bits";
const LOGS: &str = "what is logged is the program's matter (tracing, EngineStats, a trace)";
const SAVES: &str = "checkpoints are sharded, and load on any number of ranks; `fsdp consolidate` makes plain files";
const PINNED: &str = "host memory is where the CPU backend computes: there is nothing to copy";
const BUFFERS: &str = "a unit is the buffer: the next is read and the last written while one computes or steps";
const ON_DEVICE: &str = "the device steps, also what lies elsewhere between steps";
const SCALE: &str = "the dynamic scale begins with 65536, halves at once and doubles after 2000 good steps";
const PERSIST: &str = "mark small fields #[shard(replicate)]; what no attribute names stays gathered as the root unit";

pub(super) static RULES: &[Rule] = &[
    rule("train_batch_size", Set(apply::train_batch_size)),
    rule("train_micro_batch_size_per_gpu", Set(apply::micro_batch_size)),
    rule("gradient_accumulation_steps", Set(apply::gradient_accumulation)),
    rule("gradient_clipping", Set(apply::gradient_clipping)),
    rule("prescale_gradients", Listed(NotNeeded, "gradients are added up in float32, and scaled after the sum")),
    rule("gradient_predivide_factor", Listed(NotNeeded, "gradients are added up in float32, and scaled after the sum")),
    rule("fp32_allreduce", Set(apply::fp32_allreduce)),
    rule("communication_data_type", Set(apply::communication_data_type)),
    rule("seq_parallel_communication_data_type", Unless(is_off, "there is no sequence parallelism")),
    rule("sparse_gradients", Unless(is_off, "gradients of embeddings are reduced whole")),
    rule("disable_allgather", Unless(is_off, "updated parameters are gathered always")),
    rule("optimizer", Section(true)),
    rule("optimizer.type", Set(apply::optimizer_type)),
    rule("optimizer.params", Section(true)),
    rule("optimizer.params.lr", Set(apply::learning_rate)),
    rule("optimizer.params.*", Listed(Program, "given to the optimizer that the program makes")),
    rule("optimizer.legacy_fusion", Listed(NotNeeded, "FusedAdamW is one pass")),
    rule("scheduler", Section(true)),
    rule("scheduler.type", Listed(Program, "the program gives a learning rate to each step")),
    rule("scheduler.params", Section(true)),
    rule("scheduler.params.*", Listed(Program, "the program gives a learning rate to each step")),
    rule("zero_optimization", Section(true)),
    rule("zero_optimization.stage", Set(apply::stage)),
    rule("zero_optimization.allgather_partitions", Listed(NotNeeded, "updated parameters are all-gathered always")),
    rule("zero_optimization.allgather_bucket_size", Listed(NotNeeded, BUCKET)),
    rule("zero_optimization.overlap_comm", Listed(NotNeeded, OVERLAP)),
    rule("zero_optimization.reduce_scatter", Listed(NotNeeded, "gradients are reduce-scattered from stage 1 on")),
    rule("zero_optimization.reduce_bucket_size", Listed(NotNeeded, BUCKET)),
    rule("zero_optimization.use_multi_rank_bucket_allreduce", Listed(NotNeeded, BUCKET)),
    rule("zero_optimization.contiguous_gradients", Listed(NotNeeded, "a unit's gradients are reduced as they lie")),
    rule("zero_optimization.grad_hooks", Listed(NotNeeded, OVERLAP)),
    rule(
        "zero_optimization.round_robin_gradients",
        Listed(NotNeeded, "blocks are cut by rows, so all ranks work alike"),
    ),
    rule("zero_optimization.load_from_fp32_weights", Listed(NotNeeded, SAVES)),
    rule("zero_optimization.elastic_checkpoint", Listed(NotNeeded, SAVES)),
    rule("zero_optimization.legacy_stage1", Listed(NotNeeded, "there is one stage 1")),
    rule("zero_optimization.sub_group_size", Listed(NotNeeded, "the optimizer steps unit by unit")),
    rule(
        "zero_optimization.ignore_unused_parameters",
        Listed(NotNeeded, "a parameter without gradient is not stepped"),
    ),
    rule(
        "zero_optimization.memory_efficient_linear",
        Listed(NotNeeded, "gathered weights are never held for backward"),
    ),
    rule("zero_optimization.module_granularity_threshold", Listed(NotNeeded, BUCKET)),
    rule("zero_optimization.use_all_reduce_for_fetch_params", Listed(NotNeeded, "units are all-gathered always")),
    rule("zero_optimization.override_module_apply", Listed(NotNeeded, "Burn initialises a parameter when it is read")),
    rule("zero_optimization.log_trace_cache_warnings", Listed(NotNeeded, LOGS)),
    rule("zero_optimization.enable_sanity_checks", Listed(NotNeeded, "collectives compare their tags always")),
    rule("zero_optimization.stage3_max_live_parameters", Set(apply::max_live_parameters)),
    rule("zero_optimization.stage3_prefetch_bucket_size", Set(apply::prefetch_bucket_size)),
    rule(
        "zero_optimization.stage3_max_reuse_distance",
        Listed(NotNeeded, "the last unit of forward stays for backward"),
    ),
    rule("zero_optimization.stage3_param_persistence_threshold", Listed(Program, PERSIST)),
    rule("zero_optimization.stage3_model_persistence_threshold", Listed(Program, PERSIST)),
    rule("zero_optimization.stage3_gather_16bit_weights_on_model_save", Listed(NotNeeded, SAVES)),
    rule("zero_optimization.stage3_gather_fp16_weights_on_model_save", Listed(NotNeeded, SAVES)),
    rule("zero_optimization.gather_16bit_weights_on_model_save", Listed(NotNeeded, SAVES)),
    rule(
        "zero_optimization.stage3_use_all_reduce_for_fetch_params",
        Listed(NotNeeded, "units are all-gathered always"),
    ),
    rule("zero_optimization.stage3_module_granularity_threshold", Listed(NotNeeded, BUCKET)),
    rule("zero_optimization.mics_shard_size", Set(apply::mics_shard_size)),
    rule(
        "zero_optimization.mics_hierarchical_params_gather",
        Unless(is_off, "gathers are not split into one in a node and one between nodes"),
    ),
    rule("zero_optimization.zero_hpz_partition_size", Set(apply::hpz_partition_size)),
    rule("zero_optimization.zero_quantized_weights", Unless(is_off, "gathers are not quantized (ZeRO++)")),
    rule("zero_optimization.zero_quantized_nontrainable_weights", Unless(is_off, "gathers are not quantized (ZeRO++)")),
    rule("zero_optimization.zero_quantized_gradients", Unless(is_off, "reductions are not quantized (ZeRO++)")),
    rule("zero_optimization.zeropp_loco_param", Unless(is_off, "reductions are not quantized (ZeRO++)")),
    rule("zero_optimization.zeropp_loco_param.*", Listed(Missing, "reductions are not quantized (ZeRO++)")),
    rule("zero_optimization.zenflow", Section(false)),
    rule("zero_optimization.zenflow.*", Listed(Missing, "ZenFlow's delayed updates are not there")),
    rule("zero_optimization.leaf_module", Section(false)),
    rule("zero_optimization.leaf_module.*", Listed(Program, "mark the field #[shard(unit)]: all below it is one unit")),
    rule("zero_optimization.cpu_offload", Set(offload::cpu_offload)),
    rule("zero_optimization.cpu_offload_params", Set(offload::cpu_offload)),
    rule("zero_optimization.cpu_offload_use_pin_memory", Listed(NotNeeded, PINNED)),
    rule("zero_optimization.offload_param", Section(true)),
    rule("zero_optimization.offload_param.device", Set(offload::device)),
    rule("zero_optimization.offload_param.nvme_path", Set(offload::nvme_path)),
    rule("zero_optimization.offload_param.pin_memory", Listed(NotNeeded, PINNED)),
    rule("zero_optimization.offload_param.buffer_count", Listed(NotNeeded, BUFFERS)),
    rule("zero_optimization.offload_param.buffer_size", Listed(NotNeeded, BUFFERS)),
    rule("zero_optimization.offload_param.max_in_cpu", Set(offload::max_in_cpu)),
    rule(
        "zero_optimization.offload_param.fast_init",
        Listed(NotNeeded, "Burn initialises a parameter when it is read"),
    ),
    rule("zero_optimization.offload_optimizer", Section(true)),
    rule("zero_optimization.offload_optimizer.device", Set(offload::device)),
    rule("zero_optimization.offload_optimizer.nvme_path", Set(offload::nvme_path)),
    rule("zero_optimization.offload_optimizer.pin_memory", Listed(NotNeeded, PINNED)),
    rule("zero_optimization.offload_optimizer.buffer_count", Listed(NotNeeded, BUFFERS)),
    rule("zero_optimization.offload_optimizer.buffer_size", Listed(NotNeeded, BUFFERS)),
    rule(
        "zero_optimization.offload_optimizer.fast_init",
        Listed(NotNeeded, "Burn initialises a parameter when it is read"),
    ),
    rule("zero_optimization.offload_optimizer.pipeline", Listed(NotNeeded, BUFFERS)),
    rule("zero_optimization.offload_optimizer.pipeline_read", Listed(NotNeeded, BUFFERS)),
    rule("zero_optimization.offload_optimizer.pipeline_write", Listed(NotNeeded, BUFFERS)),
    rule("zero_optimization.offload_optimizer.ratio", Set(offload::ratio)),
    rule("zero_optimization.offload_optimizer.super_offload", Unless(is_off, "there is no SuperOffload")),
    rule("zero_optimization.offload_optimizer.cpuadam_cores_perc", Listed(NotNeeded, ON_DEVICE)),
    rule("zero_allow_untested_optimizer", Listed(NotNeeded, "a trial decides whether an optimizer can step blocks")),
    rule("zero_force_ds_cpu_optimizer", Listed(NotNeeded, "a trial decides whether an optimizer can step blocks")),
    rule("fp16", Section(true)),
    rule("fp16.enabled", Set(apply::fp16)),
    rule("fp16.loss_scale", Set(apply::loss_scale)),
    rule("fp16.initial_scale_power", Unless(|value| number(value) == Some(16.0), SCALE)),
    rule("fp16.loss_scale_window", Unless(|value| number(value) == Some(2000.0), SCALE)),
    rule("fp16.hysteresis", Unless(is_one, SCALE)),
    rule("fp16.consecutive_hysteresis", Unless(is_off, SCALE)),
    rule("fp16.min_loss_scale", Unless(is_one, SCALE)),
    rule("fp16.auto_cast", Listed(NotNeeded, "integers are the only input of most models; floats are the program's")),
    rule("fp16.fp16_master_weights_and_grads", Unless(is_off, "master weights are float32")),
    rule("bf16", Section(true)),
    rule("bf16.enabled", Set(apply::bf16)),
    rule("bf16.immediate_grad_update", Listed(NotNeeded, "gradients are reduced as they appear")),
    rule("bf16.check_grad_overflow", Listed(NotNeeded, "training.non_finite looks at the norm of every step")),
    rule("bf16.bf16_master_weights_and_grads", Unless(is_off, "master weights are float32")),
    rule("bf16.bf16_optimizer_states", Unless(is_off, "the optimizer's state is float32")),
    // Files that were made from an fp16 section.
    rule("bf16.auto_cast", Listed(NotNeeded, "it has no effect in DeepSpeed")),
    rule("bf16.loss_scale", Listed(NotNeeded, "bf16 needs no scale, and DeepSpeed has none for it")),
    rule("bf16.initial_scale_power", Listed(NotNeeded, "bf16 needs no scale, and DeepSpeed has none for it")),
    rule("bf16.loss_scale_window", Listed(NotNeeded, "bf16 needs no scale, and DeepSpeed has none for it")),
    rule("bf16.hysteresis", Listed(NotNeeded, "bf16 needs no scale, and DeepSpeed has none for it")),
    rule("bf16.min_loss_scale", Listed(NotNeeded, "bf16 needs no scale, and DeepSpeed has none for it")),
    rule("bfloat16", Section(true)),
    rule("bfloat16.enabled", Set(apply::bf16)),
    rule("data_types", Section(true)),
    rule("data_types.grad_accum_dtype", Unless(is_float32, "gradients are added up in float32")),
    rule("amp", Section(false)),
    rule("amp.*", Listed(Missing, "there is no Apex; use bf16 or fp16")),
    rule("torch_autocast", Section(false)),
    rule("torch_autocast.*", Listed(Missing, "there is no autocast; use bf16 or fp16")),
    rule("activation_checkpointing", Section(false)),
    rule("activation_checkpointing.*", Listed(Program, "fsdp_burn::recompute around a block in `forward`")),
    rule("aio", Section(true)),
    rule("aio.block_size", Set(offload::block_size)),
    rule("aio.queue_depth", Set(offload::queue_depth)),
    rule("aio.*", Listed(NotNeeded, "io_uring takes all blocks of a transfer at once")),
    rule("checkpoint", Section(false)),
    rule("checkpoint.*", Listed(NotNeeded, SAVES)),
    rule("load_universal_checkpoint", Listed(NotNeeded, SAVES)),
    rule("nebula", Section(false)),
    rule("nebula.*", Listed(NotNeeded, SAVES)),
    rule("use_node_local_storage", Unless(is_off, "a checkpoint is one directory that all ranks reach")),
    rule("steps_per_print", Listed(NotNeeded, LOGS)),
    rule("wall_clock_breakdown", Listed(NotNeeded, LOGS)),
    rule("memory_breakdown", Listed(NotNeeded, LOGS)),
    rule("dump_state", Listed(NotNeeded, LOGS)),
    rule("timers", Section(false)),
    rule("timers.*", Listed(NotNeeded, LOGS)),
    rule("tensorboard", Section(false)),
    rule("tensorboard.*", Listed(NotNeeded, LOGS)),
    rule("wandb", Section(false)),
    rule("wandb.*", Listed(NotNeeded, LOGS)),
    rule("comet", Section(false)),
    rule("comet.*", Listed(NotNeeded, LOGS)),
    rule("csv_monitor", Section(false)),
    rule("csv_monitor.*", Listed(NotNeeded, LOGS)),
    rule("comms_logger", Section(false)),
    rule("comms_logger.*", Listed(NotNeeded, LOGS)),
    rule("flops_profiler", Section(false)),
    rule("flops_profiler.*", Listed(NotNeeded, LOGS)),
    rule("autotuning", Section(false)),
    rule("autotuning.*", Listed(NotNeeded, "`fsdp simulate --tune` tries settings without a run")),
    rule("elasticity", Section(false)),
    rule("elasticity.*", Listed(Missing, "the number of ranks is that of the launch")),
    rule("pipeline", Section(false)),
    rule("pipeline.*", Listed(Missing, "there is no pipeline parallelism")),
    rule("tensor_parallel", Section(false)),
    rule("tensor_parallel.*", Listed(Missing, "there is no tensor parallelism")),
    rule("sequence_parallel_size", Unless(is_one, "there is no sequence parallelism")),
    rule("moe", Section(false)),
    rule("moe.*", Listed(Missing, "there is no expert parallelism")),
    rule("sparse_attention", Section(false)),
    rule("sparse_attention.*", Listed(Missing, "attention is the model's")),
    rule("progressive_layer_drop", Section(false)),
    rule("progressive_layer_drop.*", Listed(Missing, "which layers run is the model's")),
    rule("curriculum_learning", Section(false)),
    rule("curriculum_learning.*", Listed(Missing, "which data is learned when is the program's")),
    rule("data_efficiency", Section(false)),
    rule("data_efficiency.*", Listed(Missing, "which data is learned when is the program's")),
    rule("compression_training", Section(false)),
    rule("compression_training.*", Listed(Missing, "there is no compression")),
    rule("quantize_training", Section(false)),
    rule("quantize_training.*", Listed(Missing, "there is no compression")),
    rule("eigenvalue", Section(false)),
    rule("eigenvalue.*", Listed(Missing, "there is no compression")),
    rule("hybrid_engine", Section(false)),
    rule("hybrid_engine.*", Listed(Missing, "there is no inference engine")),
    rule("compile", Section(false)),
    rule("compile.*", Listed(NotNeeded, "the program is compiled")),
    rule("dataloader_drop_last", Listed(Program, "rank.while_all or rank.while_any end ranks together")),
    rule("vocabulary_size", Listed(NotNeeded, "a table's rows need not divide")),
    rule("graph_harvesting", Listed(NotNeeded, "there are no CUDA graphs")),
];

/// The value as a number.
pub(super) fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Integer(integer) => Some(*integer as f64),
        Value::Number(number) => Some(*number),
        _ => None,
    }
}

/// Nothing is asked for.
fn is_off(value: &Value) -> bool {
    matches!(value, Value::Bool(false) | Value::Other("null")) || number(value) == Some(0.0)
}

fn is_one(value: &Value) -> bool {
    number(value) == Some(1.0)
}

fn is_float32(value: &Value) -> bool {
    matches!(value, Value::Text(text) if ["fp32", "float32"].contains(&text.as_str())) || is_off(value)
}
