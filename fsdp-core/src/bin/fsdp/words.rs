//! One idea, five names.

use std::fmt::Write;

/// Ours, FSDP1, FSDP2, DeepSpeed, Megatron-FSDP.
const HEAD: [&str; 5] = ["fsdp-burn", "FSDP1", "FSDP2", "DeepSpeed", "Megatron-FSDP"];

const WORDS: [[&str; 5]; 18] = [
    ["stage = 0", "NO_SHARD", "replicate", "stage 0", "no_shard"],
    ["stage = 1", "-", "-", "stage 1", "optim"],
    ["stage = 2", "SHARD_GRAD_OP", "reshard_after_forward=False", "stage 2", "optim_grads"],
    ["stage = 3", "FULL_SHARD", "fully_shard", "stage 3", "optim_grads_params"],
    ["mesh = { replicate, shard }", "HYBRID_SHARD", "2-D DeviceMesh", "mics_shard_size", "dp_outer_dim, dp_shard_dim"],
    ["#[shard(units)]", "auto_wrap_policy", "fully_shard per block", "-", "fsdp_unit_modules"],
    ["#[shard(keep)]", "-", "reshard_after_forward=False", "-", "-"],
    ["#[shard(replicate)]", "ignored_states", "ignored_params", "stage3_param_persistence_threshold", "-"],
    ["spec(_, \"shard\")", "-", "shard_placement_fn", "-", "-"],
    [
        "prefetch.forward",
        "forward_prefetch",
        "set_modules_to_forward_prefetch",
        "stage3_prefetch_bucket_size",
        "overlap_param_gather",
    ],
    [
        "prefetch.backward",
        "backward_prefetch",
        "set_modules_to_backward_prefetch",
        "stage3_prefetch_bucket_size",
        "overlap_param_gather",
    ],
    ["prefetch.max_bytes", "limit_all_gathers", "-", "stage3_max_live_parameters", "-"],
    ["precision.parameters", "param_dtype", "param_dtype", "bf16, fp16", "main_params_dtype"],
    ["precision.reduce", "reduce_dtype", "reduce_dtype", "communication_data_type", "grad_comm_dtype"],
    [
        "gradient_accumulation",
        "no_sync",
        "set_requires_gradient_sync",
        "gradient_accumulation_steps",
        "sync_model_each_microbatch",
    ],
    ["gradient_clip_norm", "clip_grad_norm_", "clip_grad_norm_", "gradient_clipping", "--clip-grad"],
    [
        "model.save, fsdp consolidate",
        "FSDP.state_dict_type",
        "distributed.checkpoint",
        "zero_to_fp32.py",
        "fsdp_dtensor",
    ],
    [
        "fsdp_burn::recompute",
        "checkpoint_wrapper",
        "checkpoint_wrapper",
        "activation_checkpointing",
        "--recompute-granularity",
    ],
];

/// The table, as Markdown; "-" where there is no such thing.
pub(crate) fn table() -> String {
    let width = |column: usize| WORDS.iter().chain([&HEAD]).map(|row| row[column].len() + 2).max().unwrap_or(0);
    let quoted = |cell: &str| if cell == "-" { cell.to_owned() } else { format!("`{cell}`") };
    let mut text = String::new();
    let mut line = |cells: [String; 5]| {
        let cells = cells.iter().enumerate().map(|(column, cell)| format!("{cell:<width$}", width = width(column)));
        let _ = writeln!(text, "| {} |", cells.collect::<Vec<_>>().join(" | "));
    };
    line(HEAD.map(str::to_owned));
    line(std::array::from_fn(|column| "-".repeat(width(column))));
    for row in WORDS {
        line(row.map(quoted));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_as_wide_as_the_head_and_our_keys_exist() {
        let table = table();
        let widths: Vec<_> = table.lines().map(str::len).collect();
        assert!(widths.iter().all(|width| *width == widths[0]), "{table}");
        assert_eq!(table.lines().count(), WORDS.len() + 2);
        for name in WORDS.iter().map(|row| row[0]).filter(|name| name.starts_with("prefetch.")) {
            assert!(fsdp_core::config_keys().iter().any(|key| key.path() == name), "{name}");
        }
    }
}
