//! A decoder-only transformer as sizes: its units, its activations and its arithmetic, from six numbers.

use crate::{Activations, ComputePrecision, ModelShape, ParamShape, ROOT_UNIT, UnitShape};

/// A pre-norm transformer with learned positions, biases and a head of its own, as GPT-2 and the example `train`.
///
/// ```
/// use fsdp_core::{ComputePrecision, Transformer};
///
/// // GPT-2's smallest, with a head of its own.
/// let gpt2 = Transformer { layers: 12, width: 768, heads: 12, sequence: 1024, vocabulary: 50257, recompute: false };
/// assert_eq!(gpt2.shape().parameter_len(), 163_037_184);
/// let kept = gpt2.activations(1, ComputePrecision::F32).begin_bytes;
/// let recomputed = Transformer { recompute: true, ..gpt2 }.activations(1, ComputePrecision::F32).begin_bytes;
/// assert!(recomputed < kept / 2);
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

    /// What one rank holds beside parameters, optimizer state and gradients, for `batch` sequences in `precision`.
    ///
    /// These are the places of a step where most is held, found by looking at the largest live allocations of runs on Burn's
    /// Flex backend, on a device with balanced gradient checkpointing. Scores are held whole, as by an attention that is not
    /// fused; each matrix is multiplied with all positions at once, as the example's model does, or its gradient would be held
    /// once for each sample; logits are float32 in every precision. See [Note: Where a step holds most].
    pub fn activations(&self, batch: usize, precision: ComputePrecision) -> Activations {
        let Sizes { vectors, scores, logits, .. } = self.sizes(batch);
        let [mlp, attention] = [self.perceptron(batch), self.attention(batch)];
        let layers = (self.layers as u128).min(1 << 24);
        // Outputs of matrix products (`query`, `key`, `value`, the mixture, `project`, four times `up`, `down`), and scores.
        let outputs = 10 * vectors;
        let (in_forward, in_backward) = match self.recompute {
            true => (vectors, vectors),
            // The raw scores are let go of when backward begins.
            false => (outputs + 2 * scores, outputs + scores),
        };
        let below = layers.saturating_sub(1);
        let embedded = vectors + self.sizes(1).vectors;
        let head = product(self.width as u128, self.vocabulary as u128);
        let element_bytes = u128::from(precision.element_bytes());
        let phase = |elements: u128, float32: u128, twice: u128| Phase {
            bytes: element_bytes.saturating_mul(elements).saturating_add(4 * float32),
            transient_bytes: element_bytes.saturating_mul(twice),
        };
        let begin = [
            // Forward, in the attention of the last block: raw and scaled scores, and their exponentials.
            phase(embedded + below * in_forward + 3 * scores + 6 * vectors, 0, scores),
            // Forward, in the loss: logits, less their maximum, and their exponentials.
            phase(embedded + layers * in_forward, 3 * logits, 0),
            // Backward of the head.
            phase(embedded + layers * in_backward + 2 * vectors + 2 * head, logits, head),
            // Backward of the last block.
            phase(below * in_backward + mlp.elements, 0, mlp.twice),
            phase(below * in_backward + attention.elements, 0, attention.twice),
        ];
        let begin = begin.into_iter().max_by_key(|phase| phase.bytes).unwrap_or_default();
        let last = [&mlp, &attention].map(|part| phase(part.elements, 0, part.twice).bytes);
        let graph_bytes = GRAPH_BYTES.saturating_mul(layers);
        let bytes = |bytes: u128| u64::try_from(bytes.saturating_add(graph_bytes)).unwrap_or(u64::MAX);
        Activations {
            begin_bytes: bytes(begin.bytes),
            last_bytes: bytes(last.into_iter().max().unwrap_or_default()),
            transient_bytes: u64::try_from(begin.transient_bytes).unwrap_or(u64::MAX),
        }
    }

    /// [`Activations::begin_bytes`] of [`Transformer::activations`], where one number is enough.
    pub fn activation_bytes(&self, batch: usize, precision: ComputePrecision) -> u64 {
        self.activations(batch, precision).begin_bytes
    }

    /// Backward of a perceptron, at its second matrix: its own tensors (`down` is let go of), the input of the matrix once
    /// more, gradients of its input and output, and the matrix's own gradient.
    fn perceptron(&self, batch: usize) -> Part {
        let Sizes { vectors, scores, .. } = self.sizes(batch);
        let gradient = product(4 * self.width as u128, self.width as u128);
        Part { elements: 19 * vectors + scores + 2 * gradient, twice: gradient }
    }

    /// Backward of attention: the softmax is computed again from its scores.
    fn attention(&self, batch: usize) -> Part {
        let Sizes { vectors, scores, .. } = self.sizes(batch);
        // Gradients of the perceptron's two matrices, and of `project`.
        let gradients = 9 * (self.width as u128).saturating_mul(self.width as u128).min(MOST);
        Part { elements: 6 * vectors + 5 * scores + gradients, twice: scores }
    }

    fn sizes(&self, batch: usize) -> Sizes {
        let [batch, width, heads, sequence, vocabulary] =
            [batch, self.width, self.heads, self.sequence, self.vocabulary].map(|size| size as u128);
        let tokens = batch.saturating_mul(sequence);
        let of_each = |size: u128| product(tokens, size);
        Sizes { vectors: of_each(width), scores: of_each(heads.saturating_mul(sequence)), logits: of_each(vocabulary) }
    }
}

/// Elements of a matrix.
fn product(rows: u128, columns: u128) -> u128 {
    rows.saturating_mul(columns).min(MOST)
}

/// What a product of sizes is at most, so that sums of them for all blocks can still be counted.
const MOST: u128 = 1 << 92;

/// What the graph of a block takes, beside tensors: about so many bytes for some two hundred operations.
const GRAPH_BYTES: u128 = 100_000;

/// Elements of one rank's batch.
struct Sizes {
    /// A vector for each token.
    vectors: u128,
    /// A number for each head and pair of tokens.
    scores: u128,
    /// A number for each token and word.
    logits: u128,
}

/// What is held in the backward of a part of a block, in elements, and how much of it for a moment only.
struct Part {
    elements: u128,
    twice: u128,
}

#[derive(Default)]
struct Phase {
    bytes: u128,
    transient_bytes: u128,
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
    fn activations_grow_with_the_batch_and_halve_with_16_bits() {
        let graph = TINY.layers as u64 * GRAPH_BYTES as u64;
        let of = |batch, precision| TINY.activations(batch, precision).begin_bytes - graph;
        // Rows of positions are the same for every sample.
        let positions = 4 * 16 * 8;
        assert_eq!(of(6, ComputePrecision::F32) - positions, 3 * (of(2, ComputePrecision::F32) - positions));
        // But for the logits of the loss, where such a small model holds most.
        let logits = 3 * 4 * 2 * 16 * 32;
        assert_eq!(2 * (of(2, ComputePrecision::Mixed16) - logits), of(2, ComputePrecision::F32) - logits);
    }

    #[test]
    fn most_is_held_where_the_sizes_say() {
        let model = Transformer { layers: 4, width: 128, heads: 4, sequence: 64, vocabulary: 256, recompute: false };
        // Vectors and scores of four samples, and the gradient of a perceptron's matrix, in bytes.
        let (v, s, gradient) = (4 * 4 * 64 * 128, 4 * 4 * 4 * 64 * 64, 4 * 4 * 128 * 128);
        let of = |model: Transformer| {
            let graph = model.layers as u64 * GRAPH_BYTES as u64;
            let found = model.activations(4, ComputePrecision::F32);
            (found.begin_bytes - graph, found.last_bytes - graph, found.transient_bytes)
        };
        let (last, logits) = (19 * v + s + 2 * gradient, 4 * 4 * 64 * 256);
        // With few blocks where backward begins, with more where forward ends.
        let shallow = Transformer { layers: 2, ..model };
        assert_eq!(of(shallow), ((10 * v + s) + last, last, gradient));
        assert_eq!(of(model), (v + v / 4 + 4 * (10 * v + 2 * s) + 3 * logits, last, 0));
        // With recomputation blocks keep their input.
        assert_eq!(of(Transformer { recompute: true, ..model }).0, 3 * v + last);
        // With a large vocabulary, in the backward of the head, or where the width is less than the tokens, in the loss.
        let words = Transformer { vocabulary: 8192, sequence: 16, ..model };
        let (v16, s16, logits, head) = (v / 4, s / 16, 4 * 4 * 16 * 8192, 4 * 128 * 8192);
        assert_eq!(of(words).0, 4 * (10 * v16 + s16) + v16 + v16 / 4 + 2 * v16 + logits + 2 * head);
        let narrow = Transformer { width: 32, ..words };
        let quarter = v16 / 4;
        assert_eq!(of(narrow).0, 4 * (10 * quarter + 2 * s16) + quarter + quarter / 4 + 3 * logits);
        // With long sequences, in attention.
        let long = Transformer { layers: 1, sequence: 1024, ..model };
        let (v, s) = (16 * v, 256 * s);
        assert_eq!(of(long), (6 * v + 5 * s + 4 * 9 * 128 * 128, 6 * v + 5 * s + 4 * 9 * 128 * 128, s));
    }

    #[test]
    fn sizes_beyond_all_counting_are_the_largest_number() {
        let model = Transformer {
            layers: usize::MAX,
            width: usize::MAX,
            heads: usize::MAX,
            sequence: usize::MAX,
            vocabulary: usize::MAX,
            recompute: false,
        };
        let found = model.activations(usize::MAX, ComputePrecision::F32);
        assert_eq!((found.begin_bytes, found.last_bytes), (u64::MAX, u64::MAX));
    }
}
