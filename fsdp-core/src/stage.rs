//! The four stages of sharding: what each rank holds whole, what it holds a part of, and what that costs in traffic.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How much of the training state is cut over the ranks: ZeRO's stages 1 to 3, and 0 for plain data parallelism.
///
/// With P parameters on N ranks, counted in elements ("full" means that every rank holds all of it):
///
/// | stage | parameters | gradients | optimizer state | sent per rank and step |
/// |---|---|---|---|---|
/// | 0 DDP | full | full | full | all-reduce: 2P(N−1)/N |
/// | 1 | full | full until the step | 1/N | reduce-scatter and all-gather: 2P(N−1)/N |
/// | 2 | full | 1/N, reduced as they appear | 1/N | reduce-scatter and all-gather: 2P(N−1)/N |
/// | 3 FSDP | 1/N, plus the gathered units | 1/N | 1/N | two all-gathers and a reduce-scatter: 3P(N−1)/N |
///
/// An all-reduce is a reduce-scatter followed by an all-gather, two passes of P(N−1)/N elements each. So stages 1 and 2
/// save memory without sending more. Stage 3 gathers a unit once for forward and once more for backward, because it
/// frees the unit in between, and reduces once: three passes, **1.5 times** what DDP sends. (Texts that say 3 times
/// count DDP's all-reduce as one pass.) Units that stay gathered between forward and backward skip the second gather.
///
/// ```
/// use fsdp_core::Stage;
///
/// assert!(Stage::Gradients.shards_optimizer() && !Stage::Gradients.shards_parameters());
/// assert_eq!(Stage::try_from(3), Ok(Stage::Parameters));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub enum Stage {
    /// Stage 0: every rank holds everything; gradients are all-reduced.
    Ddp,
    /// Stage 1: optimizer state is cut.
    OptimizerState,
    /// Stage 2: gradients and optimizer state are cut.
    Gradients,
    /// Stage 3: parameters too; a unit is gathered while it computes.
    #[default]
    Parameters,
}

impl Stage {
    /// All stages; the index of each is its number.
    pub const ALL: [Stage; 4] = [Stage::Ddp, Stage::OptimizerState, Stage::Gradients, Stage::Parameters];

    /// The number in the configuration file, 0 to 3.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// Whether a rank holds only its part of the parameters between their uses.
    pub fn shards_parameters(self) -> bool {
        self >= Stage::Parameters
    }

    /// Whether a rank keeps only its part of the gradients, from when they are reduced.
    pub fn shards_gradients(self) -> bool {
        self >= Stage::Gradients
    }

    /// Whether a rank holds only its part of the optimizer state.
    pub fn shards_optimizer(self) -> bool {
        self >= Stage::OptimizerState
    }
}

impl TryFrom<u8> for Stage {
    type Error = UnknownStage;

    fn try_from(number: u8) -> Result<Self, UnknownStage> {
        Stage::ALL.get(usize::from(number)).copied().ok_or(UnknownStage { number })
    }
}

impl From<Stage> for u8 {
    fn from(stage: Stage) -> u8 {
        stage.number()
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Stage::Ddp => "stage 0 (DDP: nothing sharded)",
            Stage::OptimizerState => "stage 1 (optimizer state sharded)",
            Stage::Gradients => "stage 2 (gradients and optimizer state sharded)",
            Stage::Parameters => "stage 3 (FSDP: parameters, gradients and optimizer state sharded)",
        })
    }
}

/// A number that is no stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "there is no stage {number}; use 0 (DDP), 1 (optimizer state sharded), 2 (gradients too) or 3 (parameters too: FSDP)"
)]
pub struct UnknownStage {
    /// The number given.
    pub number: u8,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_names_its_stage_and_four_is_refused() {
        for stage in Stage::ALL {
            assert_eq!(Stage::try_from(stage.number()), Ok(stage));
            assert!(stage.to_string().starts_with(&format!("stage {} (", stage.number())));
        }
        assert_eq!(
            Stage::try_from(4).unwrap_err().to_string(),
            "there is no stage 4; use 0 (DDP), 1 (optimizer state sharded), 2 (gradients too) or 3 (parameters too: FSDP)"
        );
    }

    #[test]
    fn each_stage_shards_one_thing_more_than_the_one_before() {
        let sharded = Stage::ALL.map(|s| (s.shards_optimizer(), s.shards_gradients(), s.shards_parameters()));
        assert_eq!(sharded, [(false, false, false), (true, false, false), (true, true, false), (true, true, true)]);
    }
}
