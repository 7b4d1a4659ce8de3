//! A decoder-only transformer as sizes: its units, its activations and its arithmetic, from six numbers.

use crate::{ComputePrecision, ModelShape, ParamShape, ROOT_UNIT, UnitShape};

/// Buffers that the matrix products of one compute thread keep for packing their operands, in bytes: the difference
/// between what a plain run holds between steps and its parameters and optimizer state, the same for all sizes tried.
const WORKSPACE_BYTES: u64 = 2_300_000;

/// A pre-norm transformer with learned positions, biases and a head of its own, as GPT-2 and the example `train`.
///
/// ```
/// use fsdp_core::{ComputePrecision, Transformer};
///
/// // GPT-2's smallest, with a head of its own.
/// let gpt2 = Transformer { layers: 12, width: 768, heads: 12, sequence: 1024, vocabulary: 50257, recompute: false };
/// assert_eq!(gpt2.shape().parameter_len(), 163_037_184);
/// let kept = gpt2.activation_bytes(1, ComputePrecision::F32);
/// let recomputed = Transformer { recompute: true, ..gpt2 }.activation_bytes(1, ComputePrecision::F32);
/// assert!(recomputed < kept / 3);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transformer {
    /// Blocks.
    pub layers: usize,
    /// Length of the vector of one position.
    pub width: usize,
    /// Attention heads.
    pub heads: usize,
    /// Tokens of a sequence.
    pub sequence: usize,
    /// Rows of the table of tokens.
    pub vocabulary: usize,
    /// Blocks keep their input only, and run again in backward.
    pub recompute: bool,
}

impl Transformer {
    /// Elements of all its parameters; the largest number where there are more than can be counted.
    pub fn parameter_len(&self) -> u64 {
        let [layers, width, sequence, vocabulary] =
            [self.layers, self.width, self.sequence, self.vocabulary].map(|size| size as u128);
        let block = (12 * width + 13).saturating_mul(width);
        let tables = (2 * vocabulary + sequence + 2).saturating_mul(width);
        u64::try_from(block.saturating_mul(layers).saturating_add(tables)).unwrap_or(u64::MAX)
    }

    /// Its units: the table of tokens, the root unit (positions and the last norm), each block, and the head, which stays
    /// gathered.
    pub fn shape(&self) -> ModelShape {
        let Self { layers, width, sequence, vocabulary, .. } = *self;
        let param = |path: String, shape: &[usize]| ParamShape {
            path,
            shape: shape.to_vec(),
            dim: 0,
            replicate: false,
            frozen: false,
        };
        let norm = |path: &str| ["gamma", "beta"].map(|name| param(format!("{path}.{name}"), &[width]));
        let linear = |path: &str, from: usize, to: usize| {
            [param(format!("{path}.weight"), &[from, to]), param(format!("{path}.bias"), &[to])]
        };
        let unit = |name: &str, keep: bool, flops: usize, parameters: Vec<ParamShape>| UnitShape {
            keep,
            flops_per_token: Some(flops as u64),
            ..UnitShape::new(name, parameters)
        };
        let mut units = vec![unit("tokens", false, 0, vec![param("tokens.weight".into(), &[vocabulary, width])])];
        let mut root = vec![param("positions.weight".into(), &[sequence, width])];
        root.extend(norm("norm"));
        units.push(unit(ROOT_UNIT, true, 0, root));
        for layer in 0..layers {
            let path = |name: &str| format!("blocks.{layer}.{name}");
            let mut parameters = norm(&path("attention_norm")).to_vec();
            for name in ["query", "key", "value", "project"] {
                parameters.extend(linear(&path(name), width, width));
            }
            parameters.extend(norm(&path("perceptron_norm")));
            parameters.extend(linear(&path("up"), width, 4 * width));
            parameters.extend(linear(&path("down"), 4 * width, width));
            // Twelve matrices of width x width, and the scores with their mixture of values over the whole sequence.
            let flops = 2 * 12 * width * width + 4 * sequence * width;
            units.push(unit(&format!("blocks.{layer}"), false, flops, parameters));
        }
        let head = vec![param("head.weight".into(), &[width, vocabulary])];
        units.push(unit("head", true, 2 * width * vocabulary, head));
        ModelShape::new(units)
    }

    /// Bytes that one rank holds when backward begins, for `batch` sequences on a device with balanced gradient
    /// checkpointing: the outputs of matrix products and of the softmax, and what the last perceptron's backward computes
    /// again at once. Weights are not counted: they are parameters or gathered units. Scores are held whole, as by an
    /// attention that is not fused; logits are float32 in every precision.
    pub fn activation_bytes(&self, batch: usize, precision: ComputePrecision) -> u64 {
        let tokens = (batch * self.sequence) as u64;
        let vectors = tokens * self.width as u64;
        let scores = tokens * (self.heads * self.sequence) as u64;
        let logits = tokens * self.vocabulary as u64;
        let embedded = 2 * vectors; // rows of both tables
        let attention = 3 * vectors // outputs of `query`, `key` and `value`
            + 2 * scores // products of queries and keys, and their softmax
            + vectors // values, mixed
            + vectors; // output of `project`
        let perceptron = 4 * vectors // output of `up`
            + vectors; // output of `down`
        let again = 12 * vectors; // the activation function and its gradient, three vectors of four times the width
        let block = attention + perceptron;
        let blocks = match self.recompute {
            // Inputs of all, and one that runs again.
            true => self.layers as u64 * vectors + block,
            false => self.layers as u64 * block,
        };
        WORKSPACE_BYTES + precision.element_bytes() * (embedded + blocks + again) + 4 * logits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TINY: Transformer =
        Transformer { layers: 2, width: 8, heads: 2, sequence: 16, vocabulary: 32, recompute: false };

    #[test]
    fn a_transformer_has_the_units_of_the_examples_model() {
        let shape = TINY.shape();
        let names: Vec<_> = shape.units.iter().map(|unit| (unit.name.as_str(), unit.keep)).collect();
        assert_eq!(
            names,
            [("tokens", false), ("root", true), ("blocks.0", false), ("blocks.1", false), ("head", true)]
        );
        let lens: Vec<_> = shape.units.iter().map(UnitShape::parameter_len).collect();
        // Norms 4W, four squares with biases, a perceptron of 8W² with 5W of biases.
        assert_eq!(shape.parameter_len(), TINY.parameter_len());
        let largest = Transformer { layers: usize::MAX, width: usize::MAX, vocabulary: usize::MAX, ..TINY };
        assert_eq!(largest.parameter_len(), u64::MAX);
        assert_eq!(lens, [32 * 8, 16 * 8 + 16, 12 * 64 + 13 * 8, 12 * 64 + 13 * 8, 8 * 32]);
    }

    #[test]
    fn arithmetic_is_two_operations_for_each_weight_and_the_scores() {
        let shape = TINY.shape();
        let flops: Vec<_> = shape.units.iter().map(UnitShape::forward_flops_per_token).collect();
        let block = 2 * 12 * 64 + 4 * 16 * 8;
        assert_eq!(flops, [0, 0, block, block, 2 * 8 * 32]);
    }

    #[test]
    fn activations_grow_with_the_batch_and_halve_with_16_bits_but_for_the_logits() {
        let of = |batch, precision| TINY.activation_bytes(batch, precision) - WORKSPACE_BYTES;
        assert_eq!(of(6, ComputePrecision::F32), 3 * of(2, ComputePrecision::F32));
        let logits = 4 * 2 * 16 * 32;
        assert_eq!(2 * (of(2, ComputePrecision::Mixed16) - logits), of(2, ComputePrecision::F32) - logits);
        let recomputed = Transformer { recompute: true, layers: 1, ..TINY };
        let plain = Transformer { layers: 1, ..TINY };
        // With one block, its input is all that is added.
        let input = 4 * 2 * 16 * 8;
        assert_eq!(
            recomputed.activation_bytes(2, ComputePrecision::F32),
            plain.activation_bytes(2, ComputePrecision::F32) + input
        );
    }
}
