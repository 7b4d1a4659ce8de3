//! Sharded training for [Burn](https://burn.dev): ZeRO stages 0 to 3, with the model's `forward` unchanged.
//!
//! [`launch`] starts the ranks. Each shards its model with [`Rank::shard`], calls `forward` on it as ever, and trains with
//! [`ShardedModel::backward`] and [`ShardedOptimizer::step`]. Which fields of a model are gathered and freed together is
//! what `#[derive(Sharded)]` says; how much is sharded is one number of the [`Config`].
//!
//! ```
//! use burn::{module::Module, nn::{Linear, LinearConfig}, optim::SgdConfig, tensor::Tensor};
//! use fsdp_burn::{Config, Error, Sharded, Stage, StepOutcome, launch};
//!
//! #[derive(Module, Debug, Sharded)]
//! struct Tower {
//!     #[shard(units)]
//!     layers: Vec<Linear>,
//! }
//!
//! let config = Config { stage: Stage::Parameters, world_size: 2, ..Config::default() };
//! let local = launch(&config, |rank| {
//!     let device = rank.device();
//!     let layers = (0..3).map(|_| LinearConfig::new(4, 4).with_bias(false).init(&device)).collect();
//!     let mut model = rank.shard(Tower { layers })?;
//!     let mut optimizer = rank.optimizer(SgdConfig::new().init())?;
//!
//!     let output = model.layers.iter().fold(Tensor::<2>::ones([8, 4], &device), |x, layer| layer.forward(x));
//!     let gradients = model.backward(output.mean())?;
//!     let outcome = optimizer.step(0.1, &mut model, gradients)?;
//!     assert!(matches!(outcome, StepOutcome::Stepped { .. }));
//!     Ok((model.num_params(), model.num_local_params()))
//! })?;
//! assert_eq!(local, [(48, 24), (48, 24)]);
//! # Ok::<(), Error>(())
//! ```
//!
//! | to | see |
//! |---|---|
//! | mark the units of a model | [the derive](derive@Sharded), or implement [`trait@Sharded`] with a [`WrapPolicy`] |
//! | look up rows without holding the table | [`nn::Embedding`] |
//! | normalise over the batches of all ranks | [`nn::BatchNorm`] |
//! | train with Burn's own loop | [`FsdpStrategy`] |
//! | choose a stage | [`Stage`], [`ShardedModel::memory_estimate`] |
//! | read or write the settings | [`Config`] |
//! | know what was sent, held and waited for | [`Rank::traffic`], [`ShardedModel::stats`], [`launch_with`] a [`Trace`] |
//! | understand a failure | [`Error`], whose messages name the remedy |
//!
//! What is planned, scheduled and sent is decided without Burn, in `fsdp_core`; this crate executes it.

// Lets the derive's output, which names this crate, be used inside it.
#[cfg(test)]
extern crate self as fsdp_burn;

/// The code of the README, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;

mod block;
mod buffers;
mod casts;
mod checkpoint;
mod clip;
mod constants;
#[cfg(any(feature = "cuda", feature = "cpu"))]
mod cube;
mod device;
mod distribute;
mod elementwise;
mod engine;
mod error;
mod flat_state;
mod freeze;
mod fused_adamw;
mod gather_op;
mod host;
mod launch;
#[cfg(feature = "learner")]
mod learner;
mod links;
mod lora;
mod model;
pub mod nn;
mod offload;
mod optim;
#[cfg(any(feature = "cuda", feature = "cpu"))]
mod peers;
mod precision;
mod random;
mod rank;
mod recompute;
mod saver;
mod scaled_loss;
mod shard_module;
mod sharded;
mod squares;
mod sum_op;
mod survey;
mod weights;

pub use casts::{cast_input, cast_output};
pub use checkpoint::Loaded;
pub use device::DeviceMemory;
pub use engine::EngineStats;
pub use error::Error;
pub use fused_adamw::{FusedAdamW, FusedAdamWState};
pub use launch::{LaunchOptions, launch, launch_with};
#[cfg(feature = "learner")]
pub use learner::FsdpStrategy;
pub use model::{ShardedGradients, ShardedModel};
pub use optim::{ShardedOptimizer, StepOutcome};
pub use random::RandomState;
pub use rank::Rank;
pub use recompute::recompute;
pub use saver::Saver;
pub use scaled_loss::scale_loss;
pub use sharded::Sharded;
pub use weights::{Convention, Fit, LoadedWeights, WeightOptions};

pub use fsdp_core::checkpoint::{CheckpointError, SaveOptions, Saved};
pub use fsdp_core::{
    Accumulate, Activations, Axis, Buffers, CommError, ComputePrecision, Config, ConfigError, DeviceChoice, Dtype,
    Exchange, Fate, FieldRule, GradientReduction, Launcher, LauncherChoice, LauncherError, Link, LossScale,
    MemoryEstimate, Mesh, ModelShape, NonFinite, OffloadConfig, OpCount, OpKind, OptimizerKind, Plan, PlanWarning,
    PrecisionConfig, PrefetchConfig, RendezvousError, Stage, Started, Stragglers, TierError, TierShares, TierStats,
    Trace, Traffic, TrainingConfig, Transformer, Translated, TranslatedItem, WrapPolicy, human_bytes,
};
pub use fsdp_macros::Sharded;
