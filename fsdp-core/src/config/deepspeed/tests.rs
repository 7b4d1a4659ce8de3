//! DeepSpeed files: the cases of its documentation and of published files, written anew.

use proptest::prelude::*;

use super::*;
use crate::{Axis, Dtype, LossScale, Mesh, OffloadConfig, Stage, TierShares};

fn read(text: &str, ranks: Option<usize>) -> Translated {
    Config::from_deepspeed(text, "ds.json", ranks).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

fn refusal(text: &str) -> String {
    Config::from_deepspeed(text, "ds.json", None).unwrap_err().to_string()
}

fn fate(read: &Translated, key: &str) -> Fate {
    let item = read.items.iter().find(|item| item.key == key);
    item.unwrap_or_else(|| panic!("`{key}` is not listed")).fate
}

fn missing(read: &Translated) -> Vec<&str> {
    read.missing().map(|item| item.key.as_str()).collect()
}

#[test]
fn keys_are_unique_and_every_free_section_is_explained() {
    let mut keys: Vec<_> = RULES.iter().map(|rule| rule.key).collect();
    keys.sort_unstable();
    let unique = keys.len();
    keys.dedup();
    assert_eq!(keys.len(), unique);
    for rule in RULES.iter().filter(|rule| matches!(rule.how, How::Section(false))) {
        assert!(free_section_of(&format!("{}.x", rule.key)).is_some(), "{}", rule.key);
    }
}

#[test]
fn a_zero_3_file_of_a_trainer_with_auto_values_translates() {
    let text = r#"{
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
                 "hysteresis": 2, "min_loss_scale": 1},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}},
        "zero_optimization": {
            "stage": 3, "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9,
            "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": true
        },
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false
    }"#;
    let read = read(text, Some(4));
    assert_eq!((read.config.stage, read.config.world_size), (Stage::Parameters, 4));
    assert_eq!(read.config.prefetch.max_bytes, Some(4_000_000_000));
    assert_eq!(read.config.precision.parameters, Dtype::F32);
    assert_eq!((read.micro_batch_size, read.learning_rate), (None, None));
    assert_eq!(missing(&read), [""; 0], "scales of fp16 do not matter where it is not switched on");
    assert_eq!(fate(&read, "optimizer.params.betas"), Fate::Program);
}

#[test]
fn a_bf16_file_with_all_three_batch_sizes_knows_its_ranks() {
    let text = r#"{
        "train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8,
        "gradient_clipping": 1.0, "bf16": {"enabled": true},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 200000000,
            "stage3_max_live_parameters": 1000000000,
            "offload_optimizer": {"device": "cpu", "pin_memory": true}, "offload_param": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 6e-5, "betas": [0.9, 0.95], "weight_decay": 0.1}}
    }"#;
    let read = read(text, None);
    assert_eq!((read.config.world_size, read.config.training.gradient_accumulation), (8, 8));
    assert_eq!(read.items[0].told, "8 ranks, 8 micro-batches of 1 sequences");
    assert_eq!(missing(&read), [""; 0]);
    let offload = &read.config.offload;
    assert_eq!([offload.optimizer, offload.gradients, offload.parameters], [TierShares::CPU; 3]);
    assert_eq!(read.config.training.gradient_clip_norm, Some(1.0));
    assert_eq!(read.config.precision.parameters, Dtype::Bf16);
    assert_eq!(read.config.prefetch.max_bytes, Some(2_000_000_000), "two bytes each");
    assert_eq!((read.micro_batch_size, read.learning_rate), (Some(1), Some(6e-5)));
}

#[test]
fn a_stage_1_file_of_a_pretraining_run_with_fp16_and_a_static_scale_translates() {
    let text = r#"{
        "train_batch_size": 128, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 1,
        "zero_optimization": {"stage": 1}, "gradient_clipping": 1.0, "prescale_gradients": false,
        "fp16": {"enabled": true, "loss_scale": 1024, "initial_scale_power": 12},
        "communication_data_type": "fp16", "wall_clock_breakdown": true
    }"#;
    let read = read(text, Some(8));
    assert_eq!(read.config.stage, Stage::OptimizerState);
    assert_eq!(read.config.training.gradient_accumulation, 4, "128 / (4 x 8)");
    assert_eq!(read.config.precision.parameters, Dtype::F16);
    assert_eq!(read.config.precision.reduce, Dtype::F16);
    assert_eq!(read.config.precision.loss_scale, Some(LossScale::Fixed(1024.0)));
    assert_eq!(missing(&read), [""; 0], "how a dynamic scale would begin does not matter");
}

#[test]
fn without_a_zero_section_or_with_a_boolean_the_stage_is_what_deepspeed_takes() {
    assert_eq!(read("{}", None).config.stage, Stage::Ddp);
    assert_eq!(read(r#"{"zero_optimization": false, "train_batch_size": 4}"#, Some(4)).config.stage, Stage::Ddp);
    assert_eq!(read(r#"{"zero_optimization": true}"#, None).config.stage, Stage::OptimizerState);
    assert_eq!(read(r#"{"zero_optimization": {}}"#, None).config.stage, Stage::Ddp);
}

#[test]
fn a_tiny_file_with_one_batch_size_needs_the_number_of_ranks() {
    let text =
        r#"{"train_batch_size": 1024, "optimizer": {"type": "Adam", "params": {"lr": 1e-5, "betas": [0.8, 0.9]}}}"#;
    let with = read(text, Some(16));
    assert_eq!((with.micro_batch_size, with.config.training.gradient_accumulation), (Some(64), 1));
    assert_eq!(missing(&read(text, None)), ["train_batch_size"]);
}

#[test]
fn features_that_do_not_exist_here_are_listed_with_their_key() {
    let text = r#"{
        "pipeline": {"pipeline_parallel_size": 4, "schedule": "1F1B"},
        "tensor_parallel": {"autotp_size": 4},
        "optimizer": {"type": "OneBitLamb", "params": {"lr": 3e-4, "freeze_step": 1000, "max_coeff": 0.3}},
        "zero_optimization": {"stage": 2, "zero_quantized_weights": true, "zero_hpz_partition_size": 8,
            "zenflow": {"topk_ratio": 0.1, "update_interval": 4}},
        "elasticity": {"enabled": true, "max_train_batch_size": 2000},
        "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": true}}},
        "amp": {"enabled": true, "opt_level": "O1"}, "sparse_gradients": true
    }"#;
    let read = read(text, None);
    assert_eq!(
        missing(&read),
        [
            "pipeline",
            "tensor_parallel",
            "optimizer.type",
            "zero_optimization.zero_quantized_weights",
            "zero_optimization.zenflow",
            "elasticity",
            "compression_training",
            "amp",
            "sparse_gradients"
        ]
    );
    assert!(read.items.iter().all(|item| item.told.len() > 5), "{:#?}", read.items);
}

#[test]
fn sections_that_are_switched_off_and_loggers_are_no_loss() {
    let text = r#"{
        "amp": {"enabled": false}, "elasticity": {"enabled": false}, "autotuning": {"enabled": true, "fast": false},
        "tensorboard": {"enabled": true, "output_path": "logs", "job_name": "a"}, "wandb": {"enabled": true},
        "comms_logger": {"enabled": true, "verbose": false}, "flops_profiler": {"enabled": true, "profile_step": 1},
        "aio": {"block_size": 1048576, "queue_depth": 8}, "zero_allow_untested_optimizer": true,
        "activation_checkpointing": {"partition_activations": true, "number_checkpoints": null},
        "_comment": "mine", "zero_optimization": {"stage": 0, "zero_quantized_weights": false, "zero_hpz_partition_size": 1}
    }"#;
    let read = read(text, None);
    assert_eq!(missing(&read), [""; 0]);
    assert_eq!(fate(&read, "activation_checkpointing"), Fate::Program);
    assert_eq!(read.items.len(), 15, "every key of the file is listed");
}

#[test]
fn prefetch_of_nothing_and_live_parameters_of_nothing_mean_no_prefetch() {
    for key in ["stage3_max_live_parameters", "stage3_prefetch_bucket_size"] {
        let read = read(&format!(r#"{{"zero_optimization": {{"stage": 3, "{key}": 0}}}}"#), None);
        assert_eq!((read.config.prefetch.forward, read.config.prefetch.backward), (0, 0), "{key}");
        assert_eq!(read.config.prefetch.max_bytes, None);
    }
}

#[test]
fn mics_is_a_mesh_of_copies() {
    let text = r#"{"zero_optimization": {"stage": 3, "mics_shard_size": 4}}"#;
    let mesh = Mesh::new([(Axis::Replicate, 2), (Axis::Shard, 4)]).unwrap();
    assert_eq!(read(text, Some(8)).config.mesh, Some(mesh));
    assert_eq!(read(text, Some(4)).config.mesh, None, "one copy");
    let error = Config::from_deepspeed(text, "ds.json", Some(6)).unwrap_err().to_string();
    assert_eq!(error, "ds.json: `zero_optimization.mics_shard_size` is 4; it must be a divisor of the 6 ranks");
}

#[test]
fn a_second_partition_is_a_smaller_group_for_backward() {
    let text = r#"{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}"#;
    let resharded = |num_ranks| read(text, num_ranks).config.reshard_after_forward;
    assert_eq!([Some(8), Some(4), None].map(resharded), [Some(4); 3]);
    assert_eq!(fate(&read(text, Some(8)), "zero_optimization.zero_hpz_partition_size"), Fate::Set);
    let error = Config::from_deepspeed(text, "ds.json", Some(6)).unwrap_err().to_string();
    assert_eq!(error, "ds.json: `zero_optimization.zero_hpz_partition_size` is 4; it must be a divisor of the 6 ranks");
    let whole = read(&text.replace('3', "2"), Some(8));
    assert_eq!(whole.config.reshard_after_forward, None);
    assert_eq!(fate(&whole, "zero_optimization.zero_hpz_partition_size"), Fate::NotNeeded);
}

#[test]
fn mistakes_name_the_key_and_the_remedy() {
    for (text, message) in [
        (r#"{"zero_optimisation": {}}"#, "unknown key `zero_optimisation`; did you mean `zero_optimization`?"),
        (
            r#"{"zero_optimization": {"offload_optimiser": {}}}"#,
            "unknown key `zero_optimization.offload_optimiser`; did you mean `offload_optimizer`?",
        ),
        (r#"{"overlap_comm": true}"#, "`overlap_comm` belongs under [zero_optimization]; move it there"),
        (r#"{"zero_optimization": {"stage": 4}}"#, "`zero_optimization.stage` is 4; it must be an integer from 0 to 3"),
        (
            r#"{"zero_optimization": {"stage": "3"}}"#,
            "`zero_optimization.stage` is the string \"3\"; it must be a whole number of at least 0, or \"auto\"",
        ),
        (
            r#"{"zero_optimization": {"offload_param": {"device": "gpu"}}}"#,
            "`zero_optimization.offload_param.device` is \"gpu\", which does not exist; did you mean \"cpu\"?",
        ),
        (
            r#"{"fp16": {"enabled": true}, "bf16": {"enabled": true}}"#,
            "`fp16.enabled` and `bf16.enabled` are both set, but parameters have one element type; leave one of them out",
        ),
        (r#"{"fp16": true}"#, "`fp16` is the boolean true; it must be a table"),
        (r#"{"bf16": {"enabled": "yes"}}"#, "`bf16.enabled` is the string \"yes\"; it must be true, false or \"auto\""),
        (r#"{"gradient_clipping": -1}"#, "`gradient_clipping` is -1; it must be a number of at least 0, or \"auto\""),
        (
            r#"{"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}"#,
            "`train_batch_size` is 10; it must be train_micro_batch_size_per_gpu x gradient_accumulation_steps x the \
             number of ranks, a multiple of 4",
        ),
        (
            r#"{"communication_data_type": "int8"}"#,
            "`communication_data_type` is \"int8\", which does not exist; it must be \"fp32\" or \"bf16\" or \"bfp16\" or \
             \"fp16\"",
        ),
    ] {
        assert_eq!(refusal(text), format!("ds.json: {message}"), "{text}");
    }
    let unknown = refusal(r#"{"max_grad_norm": 0.5}"#);
    assert!(
        unknown.starts_with("ds.json: unknown key `max_grad_norm`; keys here are `train_batch_size`, "),
        "{unknown}"
    );
    // As Python, and not JSON, writes it.
    let python = refusal("{\"fp16\": {\n  \"enabled\": True\n}}");
    assert!(python.starts_with("ds.json:2:"), "{python}");
}

#[test]
fn a_file_is_read_and_a_missing_one_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ds_config.json");
    std::fs::write(&file, r#"{"zero_optimization": {"stage": 2}}"#).unwrap();
    assert_eq!(Config::load_deepspeed(&file, Some(2)).unwrap().config.stage, Stage::Gradients);
    let missing = Config::load_deepspeed(dir.path().join("absent.json"), None).unwrap_err();
    assert!(matches!(missing, ConfigError::Read { .. }));
}

/// What a ZeRO-Infinity file with these sections says of offload.
fn offload_of(stage: u8, sections: &str) -> Translated {
    read(
        &format!(r#"{{"zero_optimization": {{"stage": {stage}, {sections}}}, "aio": {{"block_size": 262144}}}}"#),
        None,
    )
}

#[test]
fn offload_to_nvme_is_ours_with_a_directory_of_its_own() {
    let sections = r#""offload_optimizer": {"device": "nvme", "nvme_path": "/data/", "pin_memory": true, "buffer_count": 4,
        "fast_init": false, "pipeline_read": true}, "offload_param": {"device": "nvme", "nvme_path": "/data",
        "buffer_size": 1e8, "max_in_cpu": 1e9}"#;
    let read = offload_of(3, sections);
    let expected = OffloadConfig {
        optimizer: TierShares::NVME,
        gradients: TierShares::NVME,
        parameters: TierShares::NVME,
        nvme_path: Some("/data/fsdp".to_owned()),
        nvme_block_bytes: 262_144,
        ..OffloadConfig::default()
    };
    assert_eq!(read.config.offload, expected);
    assert_eq!(missing(&read), ["zero_optimization.offload_param.max_in_cpu"]);
    let told = |key: &str| {
        let key = format!("zero_optimization.{key}");
        read.items.iter().find(|item| item.key == key).unwrap().told.clone()
    };
    assert_eq!(told("offload_optimizer.device"), "offload.optimizer = \"nvme\", offload.gradients = \"nvme\"");
    assert_eq!(told("offload_param.device"), "offload.parameters = \"nvme\"");
    assert_eq!(told("offload_param.nvme_path"), "offload.nvme_path = \"/data/fsdp\", a directory of the run's own");
    assert!(read.items.iter().all(|item| !item.told.is_empty()), "{:#?}", read.items);
}

#[test]
fn offload_is_read_as_deepspeed_reads_it() {
    // A path that is not given is the one of DeepSpeed's examples.
    let bare = offload_of(2, r#""offload_optimizer": {"device": "nvme"}"#);
    assert_eq!(bare.config.offload.nvme_path.as_deref(), Some("/local_nvme/fsdp"));
    // Parameters are offloaded at stage 3 only.
    let low = offload_of(2, r#""offload_param": {"device": "cpu"}, "cpu_offload": true"#);
    assert_eq!((low.config.offload.parameters, low.config.offload.optimizer), (TierShares::DEVICE, TierShares::CPU));
    assert_eq!(fate(&low, "zero_optimization.offload_param.device"), Fate::NotNeeded);
    assert_eq!(fate(&low, "aio.block_size"), Fate::NotNeeded, "nothing lies on NVMe");
    // A part of the state, as in ZeRO-Offload++.
    let part = offload_of(3, r#""offload_optimizer": {"device": "cpu", "ratio": 0.3}"#);
    assert_eq!(part.config.offload.optimizer, TierShares { cpu: 0.3, nvme: 0.0 });
    let none = offload_of(
        3,
        r#""offload_optimizer": {"device": "none", "nvme_path": "/data", "ratio": 0.3}, "cpu_offload": false"#,
    );
    assert_eq!(none.config.offload, OffloadConfig::default());
    assert!(none.items.iter().skip(1).all(|item| item.fate == Fate::NotNeeded), "{:#?}", none.items);
    // There is one directory.
    let two = offload_of(
        3,
        r#""offload_optimizer": {"device": "nvme", "nvme_path": "/a"}, "offload_param": {"device": "nvme", "nvme_path": "/b"}"#,
    );
    assert_eq!(two.config.offload.nvme_path.as_deref(), Some("/a/fsdp"));
    assert_eq!(missing(&two), ["zero_optimization.offload_param.nvme_path"]);
    // What a disk cannot move stays at the default, and the buffers hold what is under way.
    let odd = read(
        r#"{"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}, "aio": {"block_size": 5000, "queue_depth": 64}}"#,
        None,
    );
    assert_eq!((odd.config.offload.nvme_block_bytes, odd.config.offload.nvme_buffer_bytes), (1 << 20, 64 << 20));
    assert_eq!(missing(&odd), ["aio.block_size"]);
    assert_eq!(
        refusal(r#"{"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 1.5}}}"#),
        "ds.json: `zero_optimization.offload_optimizer.ratio` is 1.5; it must be a share from 0 to 1"
    );
}

#[test]
fn keys_and_names_that_would_break_a_line_are_escaped() {
    let error = refusal("{\"a\\nb\": 1}");
    assert!(error.starts_with("ds.json: unknown key `a\\nb`; "), "{error}");
    let error = refusal(r#"{"zero_optimization": {"offload_param": {"device": "c\np\"u"}}}"#);
    assert!(error.contains(r#"is "c\np\"u", which does not exist"#), "{error}");
    let read = read("{\"optimizer\": {\"params\": {\"x\\ny\": 1}}}", None);
    assert_eq!(read.items[0].to_string(), "optimizer.params.x\\ny = 1: given to the optimizer that the program makes");
}

prop_compose! {
    /// A file as trainers write them, with every key in or out.
    fn any_file()(
        stage in 0..4u8,
        (micro, steps, ranks) in (1..9usize, 1..9usize, 1..17usize),
        (give_whole, give_micro, give_steps) in (any::<bool>(), any::<bool>(), any::<bool>()),
        clip in proptest::option::of(prop_oneof![Just(0.0), 1e-3..1e3f64]),
        half in 0..4u8,
        scale in proptest::option::of(prop_oneof![Just(0.0), 1.0..1e6f64]),
        (live, bucket) in (proptest::option::of(0..1u64 << 40), proptest::option::of(0..1u64 << 40)),
        (offload, offload_param, path) in (0..3usize, 0..3usize, proptest::option::of("[a-z /]{0,8}")),
        ratio in proptest::option::of(0.0..=1.0f64),
        (block_size, queue_depth) in (proptest::option::of(1..1u64 << 40), proptest::option::of(1..1u64 << 40)),
        communication in 0..4usize,
        lr in proptest::option::of(1e-6..1.0f64),
    ) -> (String, usize) {
        let mut keys = vec![];
        if give_whole { keys.push(format!("\"train_batch_size\": {}", micro * steps * ranks)); }
        if give_micro { keys.push(format!("\"train_micro_batch_size_per_gpu\": {micro}")); }
        if give_steps { keys.push(format!("\"gradient_accumulation_steps\": {steps}")); }
        if let Some(clip) = clip { keys.push(format!("\"gradient_clipping\": {clip:?}")); }
        match half {
            1 => keys.push("\"bf16\": {\"enabled\": true}".into()),
            2 => keys.push(match scale {
                Some(scale) => format!("\"fp16\": {{\"enabled\": true, \"loss_scale\": {scale:?}}}"),
                None => "\"fp16\": {\"enabled\": true}".into(),
            }),
            3 => keys.push("\"fp16\": {\"enabled\": \"auto\"}".into()),
            _ => {}
        }
        let mut zero = vec![format!("\"stage\": {stage}")];
        if let Some(live) = live { zero.push(format!("\"stage3_max_live_parameters\": {live}")); }
        if let Some(bucket) = bucket { zero.push(format!("\"stage3_prefetch_bucket_size\": {bucket}")); }
        let device = |at: usize| format!("\"device\": \"{}\"", ["none", "cpu", "nvme"][at]);
        let mut optimizer = vec![device(offload)];
        optimizer.extend(ratio.map(|ratio| format!("\"ratio\": {ratio:?}")));
        optimizer.extend(path.map(|path| format!("\"nvme_path\": {path:?}")));
        zero.push(format!("\"offload_optimizer\": {{{}}}", optimizer.join(", ")));
        zero.push(format!("\"offload_param\": {{{}}}", device(offload_param)));
        let aio = [("block_size", block_size), ("queue_depth", queue_depth)];
        let aio = aio.iter().filter_map(|(key, value)| Some(format!("\"{key}\": {}", (*value)?)));
        keys.push(format!("\"aio\": {{{}}}", aio.collect::<Vec<_>>().join(", ")));
        keys.push(format!("\"zero_optimization\": {{{}}}", zero.join(", ")));
        if communication > 0 {
            keys.push(format!("\"communication_data_type\": \"{}\"", ["fp32", "bf16", "fp16"][communication - 1]));
        }
        if let Some(lr) = lr { keys.push(format!("\"optimizer\": {{\"type\": \"AdamW\", \"params\": {{\"lr\": {lr:?}}}}}")); }
        (format!("{{{}}}", keys.join(", ")), ranks)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_accepted_file_prints_a_configuration_that_reads_back_and_prints_the_same((text, ranks) in any_file()) {
        let read = Config::from_deepspeed(&text, "ds.json", Some(ranks)).unwrap();
        read.config.validate().unwrap();
        let printed = read.config.to_toml();
        let again = Config::from_toml(&printed, "printed").unwrap();
        prop_assert_eq!(&again, &read.config);
        prop_assert_eq!(again.to_toml(), printed);
        prop_assert_eq!(again.world_size, ranks);
    }
}
