//! The GPT of the examples, by command line: sizes, model and batches.

use burn::tensor::{Device, Int, Tensor, TensorData};
use fsdp_examples::{Gpt, GptConfig};

/// Sizes of the model and the batch.
#[derive(Clone, Copy, Debug, clap::Args, serde::Serialize)]
pub struct GptShape {
    /// Tokens of the vocabulary.
    #[arg(long, default_value_t = 2048)]
    pub vocabulary: usize,
    /// Width of the residual stream.
    #[arg(long, default_value_t = 512)]
    pub width: usize,
    /// Blocks.
    #[arg(long, default_value_t = 8)]
    pub layers: usize,
    /// Attention heads.
    #[arg(long, default_value_t = 8)]
    pub heads: usize,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 128)]
    pub sequence: usize,
    /// Sequences per rank and step.
    #[arg(long, default_value_t = 4)]
    pub batch: usize,
    /// Keeps only the input of each block, and runs it again in backward.
    #[arg(long)]
    pub recompute: bool,
}

impl GptShape {
    /// Builds the model, lazily initialised.
    pub fn init(&self, device: &Device) -> Gpt {
        let Self { vocabulary, width, layers, heads, sequence, recompute, .. } = *self;
        GptConfig { layers, width, heads, sequence, vocabulary, recompute }.init(device)
    }

    /// Inputs and targets, each [batch, sequence], that depend on the step and the rank alone, and repeat every four
    /// steps, so that the loss falls.
    pub fn batch(&self, step: usize, rank: usize, device: &Device) -> (Tensor<2, Int>, Tensor<2, Int>) {
        let mut state = (1000 * (step % 4) + rank + 1) as u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) % self.vocabulary as u64) as i64
        };
        let text: Vec<i64> = (0..self.batch * (self.sequence + 1)).map(|_| next()).collect();
        let [inputs, targets] = [0, 1].map(|from| {
            let rows = text.chunks(self.sequence + 1).flat_map(|row| row[from..from + self.sequence].to_vec());
            Tensor::from_data(TensorData::new(rows.collect::<Vec<_>>(), [self.batch, self.sequence]), device)
        });
        (inputs, targets)
    }
}
