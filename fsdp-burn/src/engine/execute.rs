//! Executes the schedule's actions: what moves, from which buffers to which.

use std::sync::Arc;

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::backend::ops::FloatTensorOps;
use bytes::Bytes;
use fsdp_core::{
    AbortCause, Action, CommError, Communicator, Dtype, GatherPart, OpTag, Phase, PlannedParam, Reduce, ReducePart,
    ShardLayout, SpanKind, UnitIndex,
};

use super::missing::{missing_gradient, present_gradient};
use super::tiers::Reduced;
use super::{Engine, Gathered, State, Whole};
use crate::Error;
use crate::block::Block;
use crate::host;
use crate::squares::Squares;

impl Engine {
    pub(super) fn run(&self, state: &mut State, actions: Vec<Action>) -> Result<(), Error> {
        for action in actions {
            match action {
                #[cfg(any(feature = "cuda", feature = "cpu"))]
                Action::Gather(unit) if self.links.devices.is_some() => self.start_exchange(state, unit)?,
                Action::Gather(unit) => {
                    let phase = if state.in_backward { Phase::Backward } else { Phase::Forward };
                    let tag = self.tag(state, phase, unit);
                    let pending = match self.placed(state, unit) {
                        Some(parts) => self.links.gather.gather_placed(tag, parts),
                        None => {
                            let params: Vec<_> = self.cut_params(unit).map(|(param, _)| param).collect();
                            let part = |param| self.rounded_part(param, self.take_stored(state, param)?);
                            let parts = params.into_iter().map(part).collect::<Result<Vec<_>, Error>>()?;
                            self.links.gather.all_gather(tag, parts)
                        }
                    };
                    state.units[unit].gathered = Gathered::UnderWay(pending);
                    state.held.gathered += self.plan.gathered_bytes(unit, &self.dtypes.compute);
                    state.note();
                }
                Action::WaitGather(unit) => {
                    let gathered = match std::mem::take(&mut state.units[unit].gathered) {
                        Gathered::UnderWay(pending) => {
                            Gathered::Yes(self.wait(state, SpanKind::Gather, unit, pending)?)
                        }
                        #[cfg(any(feature = "cuda", feature = "cpu"))]
                        Gathered::Exchanging { ticket, again } => self.finish_exchange(state, unit, ticket, again)?,
                        gathered => gathered,
                    };
                    state.units[unit].gathered = gathered;
                }
                Action::Free(unit) => {
                    match std::mem::take(&mut state.units[unit].gathered) {
                        Gathered::No => continue,
                        Gathered::Resharded(blocks) => {
                            state.held.resharded -= blocks.iter().map(Block::size_bytes).sum::<usize>();
                            continue;
                        }
                        Gathered::UnderWay(_) | Gathered::Yes(_) => {}
                        #[cfg(any(feature = "cuda", feature = "cpu"))]
                        Gathered::OnDevice(_) => {}
                        #[cfg(any(feature = "cuda", feature = "cpu"))]
                        Gathered::Exchanging { ticket, again } => {
                            drop(self.finish_exchange(state, unit, ticket, again)?);
                        }
                    }
                    state.held.gathered -= self.plan.gathered_bytes(unit, &self.dtypes.compute);
                }
                Action::Reshard(unit) => self.reshard(state, unit),
                Action::Regather(unit) => self.regather(state, unit)?,
                #[cfg(any(feature = "cuda", feature = "cpu"))]
                Action::Reduce(unit) if self.links.devices.is_some() => self.start_reduce_on_devices(state, unit)?,
                Action::Reduce(unit) => self.start_reduce(state, unit),
                Action::WaitReduce(unit) => self.finish_reduce(state, unit)?,
                #[cfg(any(feature = "cuda", feature = "cpu"))]
                Action::Publish(unit) if self.links.devices.is_some() => self.start_publish_on_devices(state, unit)?,
                Action::Publish(unit) => {
                    let part = |(param, spec): (usize, &PlannedParam)| {
                        let block = self.home().to_host(self.to_publish(param, spec, state))?;
                        Ok(self.gather_part(param, block, self.dtypes.compute[param]))
                    };
                    let parts = self.split_trainable(unit).map(part).collect::<Result<Vec<_>, Error>>()?;
                    if !parts.is_empty() {
                        let tag = self.tag(state, Phase::Optimizer, unit);
                        state.units[unit].publishing = Some(self.links.gather.all_gather(tag, parts));
                    }
                }
                Action::WaitPublish(unit) => {
                    #[cfg(any(feature = "cuda", feature = "cpu"))]
                    self.finish_publish_on_devices(state, unit)?;
                    if let Some(pending) = state.units[unit].publishing.take() {
                        let full = self.wait(state, SpanKind::Publish, unit, pending)?;
                        let params: Vec<_> = self.split_trainable(unit).map(|(param, _)| param).collect();
                        for (param, full) in params.into_iter().zip(full) {
                            let (shape, dtype) = (self.stored_shape(param), self.dtypes.compute[param]);
                            state.store(param, self.home().to_device(Block::Host(full), &shape, dtype));
                        }
                    }
                }
                Action::FetchBlocks(unit) => self.fetch_blocks(state, unit),
                Action::FetchState(unit) => self.fetch_state(state, unit),
                Action::WriteBack(unit) => self.write_back(state, unit)?,
                Action::WaitWriteBack(unit) => self.finish_writes(state, unit)?,
                Action::WriteGradients(unit) => self.write_gradients(state, unit)?,
                Action::Step(_) => unreachable!("the optimizer executes steps"),
            }
        }
        Ok(())
    }

    /// Keeps this rank's blocks of the smaller group, as copies, so that the gathered unit can go.
    fn reshard(&self, state: &mut State, unit: UnitIndex) {
        let blocks: Vec<Block> = match (&self.links.regather, std::mem::take(&mut state.units[unit].gathered)) {
            (Some(group), Gathered::Yes(full)) => {
                let block = |((param, _), full): ((usize, &PlannedParam), Bytes)| {
                    let (layout, index) = self.regather_layout(param, group.as_ref());
                    let block = host::cut(&full, &layout, index, self.dtypes.compute[param].size_bytes());
                    Block::Host(Bytes::copy_from_slice(&block))
                };
                self.cut_params(unit).zip(full).map(block).collect()
            }
            #[cfg(any(feature = "cuda", feature = "cpu"))]
            (Some(_), Gathered::OnDevice(full)) => self.reshard_on_device(unit, full),
            _ => unreachable!("the schedule reshards what is gathered, where there is a smaller group"),
        };
        state.held.gathered -= self.plan.gathered_bytes(unit, &self.dtypes.compute);
        state.held.resharded += blocks.iter().map(Block::size_bytes).sum::<usize>();
        state.units[unit].gathered = Gathered::Resharded(blocks);
        state.note();
    }

    /// Gathers them again; in host memory on the thread of the other gathers and in their order.
    fn regather(&self, state: &mut State, unit: UnitIndex) -> Result<(), Error> {
        let (Some(group), Gathered::Resharded(blocks)) =
            (&self.links.regather, std::mem::take(&mut state.units[unit].gathered))
        else {
            unreachable!("the schedule gathers again what was resharded")
        };
        state.held.resharded -= blocks.iter().map(Block::size_bytes).sum::<usize>();
        #[cfg(any(feature = "cuda", feature = "cpu"))]
        if self.links.devices.is_some() {
            return self.start_exchange_again(state, unit, blocks);
        }
        let part = |((param, _), block): ((usize, &PlannedParam), Block)| {
            let (layout, _) = self.regather_layout(param, group.as_ref());
            let shard = self.home().to_host(block)?;
            Ok(GatherPart { shard, layout, elem_bytes: self.dtypes.compute[param].size_bytes() })
        };
        let parts = self.cut_params(unit).zip(blocks).map(part).collect::<Result<Vec<_>, Error>>()?;
        let phase = if state.in_backward { Phase::Backward } else { Phase::Forward };
        let (tag, group) = (self.tag(state, phase, unit), group.clone());
        let pending = self.links.gather.submit(move |_| group.all_gather(&tag, &parts));
        state.units[unit].gathered = Gathered::UnderWay(pending);
        state.held.gathered += self.plan.gathered_bytes(unit, &self.dtypes.compute);
        state.note();
        Ok(())
    }

    /// The part of this rank in a gather of what the model computes with, from its block.
    fn rounded_part(&self, param: usize, block: Block) -> Result<GatherPart, Error> {
        let compute = self.dtypes.compute[param];
        let rounded = self.home().to_host(block.cast(self.dtypes.master[param], compute))?;
        Ok(self.gather_part(param, rounded, compute))
    }

    /// This rank's block. A parameter without gradient was not stepped, so it is still stored in whole.
    pub(super) fn to_publish(&self, param: usize, spec: &PlannedParam, state: &State) -> Block {
        let stored = &state.stored[param];
        if let Some(master) = &state.masters[param] {
            return master.clone().cast(self.dtypes.master[param], self.dtypes.compute[param]);
        }
        let dtype = self.dtypes.master[param];
        if stored.size_bytes() == spec.layout.full_len() * dtype.size_bytes() {
            stored.cut(&spec.layout, self.shard_index, dtype)
        } else {
            stored.clone()
        }
    }

    fn start_reduce(&self, state: &mut State, unit: UnitIndex) {
        // What an earlier micro-batch has left is added to.
        self.fetch_gradients(state, unit);
        let mut split = Vec::new();
        let mut whole = Vec::new();
        let mut bytes = 0;
        let params: Vec<_> = self.trainable(unit).map(|(param, spec)| (param, spec.clone())).collect();
        for (param, spec) in params {
            let (local, dtype) = (state.local[param].take(), self.dtypes.reduce[param]);
            state.held.local -= local.as_ref().map_or(0, Whole::size_bytes);
            bytes += spec.layout.full_len() * dtype.size_bytes();
            let full = match local {
                Some(Whole::Here(gradient)) => Full::Here(as_sent(gradient, &spec.layout, dtype)),
                Some(coming) => Full::Coming(coming),
                None => Full::Here(missing_gradient(spec.layout.full_len(), dtype)),
            };
            let part = |layout| SentPart { full, layout, dtype };
            if spec.is_split() {
                split.push(part(spec.layout));
            } else {
                let world_size = self.links.reduce_world.world_size();
                whole.push(part(ShardLayout::new(spec.layout.shape(), 0, world_size)));
            }
        }
        // Not of what is cast, copied to a device or added up further, before it is stored. See [Note: One norm for every stage].
        let is_stored_as_sent = |(param, spec): (usize, &PlannedParam)| {
            !spec.is_split() || self.dtypes.reduce[param] == self.dtypes.master[param]
        };
        let sees_squares = self.settings.sees_squares
            && self.links.reduce_replicas.is_none()
            && !self.home().is_device()
            && self.trainable(unit).all(is_stored_as_sent);
        let job = ReduceJob {
            split,
            whole,
            sees_squares,
            tag: self.tag(state, Phase::Backward, unit),
            reduce: self.reduce(),
            shard: self.links.reduce_shard.clone(),
            replicas: self.links.reduce_replicas.clone(),
        };
        state.units[unit].reducing_bytes = bytes;
        state.held.reducing += bytes;
        state.units[unit].reducing = Some(self.links.reduce.submit(move |world| job.run(world)));
        state.note();
    }

    fn finish_reduce(&self, state: &mut State, unit: UnitIndex) -> Result<(), Error> {
        let Some(reduced) = self.take_sums(state, unit)? else { return Ok(()) };
        state.held.reducing -= std::mem::take(&mut state.units[unit].reducing_bytes);
        let (split, whole): (Vec<_>, Vec<_>) = self.trainable(unit).partition(|(_, spec)| spec.is_split());
        let params: Vec<_> = split.into_iter().chain(whole).map(|(param, _)| param).collect();
        for (param, Sum { block: new, squares }) in params.into_iter().zip(reduced) {
            let is_split = self.plan.params()[param].is_split();
            let sent = match self.links.reduce_replicas.is_some() && is_split {
                true => sum_over_replicas(self.dtypes.reduce[param]),
                false => self.dtypes.reduce[param],
            };
            let (master, shape, place) =
                (self.dtypes.master[param], self.block_shape(param), self.offload.gradient_place(param));
            let new = self.home().put(new.cast(sent, master), place, &shape, master)?;
            let (gradient, squares) = match self.take_reduced_of(state, param)? {
                Some(old) => (old.plus(new, master), None),
                None => (new, squares),
            };
            state.held.reduced += gradient.size_bytes();
            state.reduced[param] = Some(Reduced::Here { gradient, squares });
        }
        state.note();
        Ok(())
    }

    /// What a reduction that is under way comes to, if one is: blocks of the split parameters, then the whole ones.
    fn take_sums(&self, state: &mut State, unit: UnitIndex) -> Result<Option<Vec<Sum>>, Error> {
        #[cfg(any(feature = "cuda", feature = "cpu"))]
        if let Some(tickets) = state.units[unit].exchanging.take() {
            let blocks = self.finish_reduce_on_devices(state, unit, tickets)?;
            return Ok(Some(blocks.into_iter().map(Sum::from).collect()));
        }
        let Some(pending) = state.units[unit].reducing.take() else { return Ok(None) };
        self.wait(state, SpanKind::Reduce, unit, pending).map(Some)
    }
}

/// A gradient in the type that it is sent in.
fn as_sent(gradient: FlexTensor, layout: &ShardLayout, dtype: Dtype) -> Bytes {
    present_gradient(Flex::float_cast(gradient, host::burn_dtype(dtype).into()), layout, dtype)
}

/// A gradient that is to be reduced.
struct SentPart {
    full: Full,
    layout: ShardLayout,
    dtype: Dtype,
}

enum Full {
    Here(Bytes),
    /// It is waited for where the reduction runs, so that a device goes on with backward meanwhile.
    Coming(Whole),
}

impl SentPart {
    fn wait(self, world: &dyn Communicator) -> Result<ReducePart, CommError> {
        let Self { full, layout, dtype } = self;
        let full = match full {
            Full::Here(full) => full,
            Full::Coming(gradient) => match gradient.wait() {
                Ok(gradient) => as_sent(gradient, &layout, dtype),
                Err(error) => {
                    let rank = world.rank();
                    let cause = AbortCause::RankFailed { rank, message: error.to_string() };
                    world.abort(cause.clone());
                    return Err(CommError::Aborted { rank, cause });
                }
            },
        };
        Ok(ReducePart { full, layout, dtype })
    }
}

/// What a reduction comes to for one parameter.
pub(super) struct Sum {
    block: Block,
    /// The sum of its squares, where they were seen.
    squares: Option<f64>,
}

impl From<Block> for Sum {
    fn from(block: Block) -> Self {
        Self { block, squares: None }
    }
}

/// One unit's reduction, as it runs on the communication thread.
struct ReduceJob {
    split: Vec<SentPart>,
    whole: Vec<SentPart>,
    /// Whether squares of split parameters are added up meanwhile.
    sees_squares: bool,
    tag: OpTag,
    reduce: Reduce,
    shard: Arc<dyn Communicator>,
    replicas: Option<Arc<dyn Communicator>>,
}

impl ReduceJob {
    /// Blocks of the split parameters, then the whole ones. The factor is applied once, after the last sum; but half precision
    /// is divided by the shards first, so that no partial sum overflows, and is added up over replicas in float32.
    fn run(self, world: &dyn Communicator) -> Result<Vec<Sum>, CommError> {
        let waited =
            |parts: Vec<SentPart>| parts.into_iter().map(|part| part.wait(world)).collect::<Result<Vec<_>, _>>();
        let (split, whole) = (waited(self.split)?, waited(self.whole)?);
        let sums = |blocks: Vec<Bytes>| blocks.into_iter().map(|block| Block::Host(block).into()).collect::<Vec<Sum>>();
        let mut reduced: Vec<Sum> = Vec::new();
        if !split.is_empty() {
            reduced = match &self.replicas {
                None if self.sees_squares => {
                    let mut squares: Vec<_> = split.iter().map(|part| Squares::new(part.dtype)).collect();
                    let mut see = |part: usize, bytes: &[u8]| squares[part].see(bytes);
                    let blocks = self.shard.reduce_scatter_and_see(&self.tag, &split, self.reduce, &mut see)?;
                    let sum = |(block, squares): (_, &Squares)| Sum {
                        block: Block::Host(block),
                        squares: Some(squares.sum()),
                    };
                    blocks.into_iter().zip(&squares).map(sum).collect()
                }
                None => sums(self.shard.reduce_scatter(&self.tag, &split, self.reduce)?),
                Some(replicas) => {
                    let is_half = split.iter().any(|part| part.dtype.size_bytes() < 4);
                    let num_shards = if is_half { self.shard.world_size() } else { 1 };
                    let blocks = self.shard.reduce_scatter(&self.tag, &split, Reduce::mean(num_shards))?;
                    let part = |(block, part): (Bytes, &ReducePart)| {
                        let dtype = sum_over_replicas(part.dtype);
                        let full = host::cast(&block, part.dtype, dtype);
                        let layout = ShardLayout::new(&[full.len() / dtype.size_bytes()], 0, replicas.world_size());
                        ReducePart { full, layout, dtype }
                    };
                    let parts: Vec<_> = blocks.into_iter().zip(&split).map(part).collect();
                    let rest = Reduce { scale: self.reduce.scale * num_shards as f64 };
                    sums(replicas.all_reduce(&self.tag, &parts, rest)?)
                }
            };
        }
        if !whole.is_empty() {
            reduced.extend(sums(world.all_reduce(&self.tag, &whole, self.reduce)?));
        }
        Ok(reduced)
    }
}

/// The element type of a sum over replicas, of what was added up over shards in `dtype`.
pub(super) fn sum_over_replicas(dtype: Dtype) -> Dtype {
    if dtype.size_bytes() < 4 { Dtype::F32 } else { dtype }
}
