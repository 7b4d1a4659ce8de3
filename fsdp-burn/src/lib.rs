//! Sharded training for Burn: ZeRO stages 0 to 3, with the model's `forward` unchanged.

// Lets the derive's output, which names this crate, be used inside it.
#[cfg(test)]
extern crate self as fsdp_burn;

mod clip;
mod distribute;
mod elementwise;
mod engine;
mod error;
mod gather_op;
mod host;
mod launch;
mod links;
mod model;
mod optim;
mod rank;
mod shard_module;
mod sharded;
mod survey;

pub use engine::EngineStats;
pub use error::Error;
pub use launch::{LaunchOptions, launch, launch_with};
pub use model::{ShardedGradients, ShardedModel};
pub use optim::{ShardedOptimizer, StepOutcome};
pub use rank::Rank;
pub use sharded::Sharded;

pub use fsdp_core::{
    Accumulate, Axis, CommError, Config, ConfigError, FieldRule, GradientReduction, Link, MemoryEstimate, Mesh,
    NonFinite, OpCount, OpKind, OptimizerKind, Plan, PlanWarning, PrefetchConfig, Stage, Trace, Traffic,
    TrainingConfig, WrapPolicy, human_bytes,
};
pub use fsdp_macros::Sharded;
