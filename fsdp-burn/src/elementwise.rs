//! Whether an optimizer may step a block of a tensor as if it were a tensor: tried out before the first step.
//!
//! Muon, LAMB, Adafactor and clipping by the norm of a tensor look at the whole of it. Burn erases the optimizer's
//! type, and users write their own, so a list of names would not do: each parameter's optimizer steps a small tensor
//! of the same path, id and number of dimensions, once whole and once in two blocks, and the results must have the
//! same bits.

use burn::grad_clipping::GradientClipping;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::TensorData;
use bytes::Bytes;
use fsdp_core::{Dtype, Plan, ShardLayout};

use crate::block::Block;
use crate::host::cut;
use crate::shard_module::{BlockTensor, NamedBlock, Ranked, ShardModule};
use crate::survey::Entry;
use crate::{Error, host};

/// Elements along each dimension of the small tensor: two blocks of two.
const SIDE: usize = 4;
/// The second step is the first that reads state.
const NUM_STEPS: usize = 2;

/// Refuses `optimizer`, which has no state, if it needs the whole of a parameter that is split.
pub(crate) fn check(
    optimizer: &ModuleOptimizer,
    type_name: &'static str,
    plan: &Plan,
    entries: &[Entry],
) -> Result<(), Error> {
    let split = |(param, _): &(usize, &Entry)| plan.params()[*param].is_split() && plan.params()[*param].trainable;
    let (params, entries): (Vec<usize>, Vec<&Entry>) = entries.iter().enumerate().filter(split).unzip();
    let trial = |block| Trial { optimizer: optimizer.clone(), entries: &entries, block }.run();
    let whole = trial(None);
    let blocks = [trial(Some(0)), trial(Some(1))];
    for (index, entry) in entries.iter().enumerate() {
        let layout = layout(entry);
        let same = |block: usize| cut(&whole.values[index], &layout, block, 4) == blocks[block].values[index];
        if !(same(0) && same(1)) {
            let optimizer = whole.recognise(entry).unwrap_or(type_name).to_owned();
            let num_shards = plan.params()[params[index]].layout.num_shards();
            return Err(Error::WholeTensorOptimizer { optimizer, parameter: entry.path(), num_shards });
        }
    }
    Ok(())
}

/// `AdamW` for `burn_optim::optim::adamw::AdamW`; a module optimizer has no more to tell.
pub(crate) fn short_type_name<O>() -> &'static str {
    let name = std::any::type_name::<O>();
    match name.rsplit("::").next().unwrap_or(name) {
        "ModuleOptimizer" => "the optimizer",
        name => name,
    }
}

struct Trial<'a> {
    optimizer: ModuleOptimizer,
    entries: &'a [&'a Entry],
    block: Option<usize>,
}

struct Outcome {
    optimizer: ModuleOptimizer,
    values: Vec<Bytes>,
}

impl Trial<'_> {
    fn run(mut self) -> Outcome {
        let mut values: Vec<Bytes> = self.entries.iter().map(|entry| self.cut(entry, ramp(entry, 0.5))).collect();
        for step in 0..NUM_STEPS {
            let mut gradients = GradientsParams::new();
            let mut module = ShardModule { blocks: Vec::new() };
            for (entry, value) in self.entries.iter().zip(&values) {
                let shape = match self.block {
                    Some(block) => layout(entry).shard_shape(block),
                    None => layout(entry).shape().to_vec(),
                };
                // Large and uneven, so that a norm of the whole differs from one of a block, and clipping bites.
                let gradient = self.cut(entry, ramp(entry, 10.0 + step as f32));
                let tensor = |bytes: Bytes| BlockTensor {
                    block: Block::Host(bytes),
                    shape: &shape,
                    dtype: Dtype::F32,
                    factor: 1.0,
                    clip_value: None,
                };
                let param = Ranked::new(entry.id, tensor(value.clone()));
                module.blocks.push(NamedBlock { path: entry.spec.path.clone(), param });
                Ranked::new(entry.id, tensor(gradient)).register(&mut gradients);
            }
            let module = self.optimizer.step(0.1, module, gradients);
            let values_of = |block: NamedBlock| match block.param.into_block() {
                Block::Host(bytes) => bytes,
                #[cfg(any(feature = "cuda", feature = "cpu"))]
                Block::Device(_) => unreachable!("it is stepped where it was made, in host memory"),
            };
            values = module.blocks.into_iter().map(values_of).collect();
        }
        Outcome { optimizer: self.optimizer, values }
    }

    fn cut(&self, entry: &Entry, full: Bytes) -> Bytes {
        match self.block {
            Some(block) => cut(&full, &layout(entry), block, size_of::<f32>()),
            None => full,
        }
    }
}

impl Outcome {
    /// The name of an optimizer of Burn's, by what it keeps of a parameter.
    fn recognise(&self, entry: &Entry) -> Option<&'static str> {
        let record = self.optimizer.into_bytes().ok()?;
        let keeps = |field: &str| {
            let field = format!("{}.{field}", entry.id.val());
            record.windows(field.len()).any(|window| window == field.as_bytes())
        };
        match () {
            () if keeps("second_moment") => Some("Adafactor"),
            () if keeps("moment_1") => Some("LAMB"),
            () if self.may_clip_by_norm() => Some("clipping by the norm of a tensor"),
            () if keeps("momentum.velocity") => Some("Muon"),
            () => None,
        }
    }

    /// Burn shows the clipping of the first group only.
    fn may_clip_by_norm(&self) -> bool {
        let by_value = matches!(self.optimizer.grad_clipping(), Some(GradientClipping::Value(_)));
        self.optimizer.has_gradient_clipping() && !by_value
    }
}

fn layout(entry: &Entry) -> ShardLayout {
    ShardLayout::new(&vec![SIDE; entry.dims], 0, 2)
}

fn ramp(entry: &Entry, scale: f32) -> Bytes {
    let len = layout(entry).full_len();
    let value = |index: usize| scale * (1.0 + index as f32 * 0.37) * if index.is_multiple_of(3) { -1.0 } else { 1.0 };
    let values: Vec<f32> = (0..len).map(value).collect();
    host::elements(TensorData::new(values, [len]))
}
