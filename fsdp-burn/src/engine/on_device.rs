//! Gathers and reductions from device to device. See [Note: Two places of a gather].

use std::time::Instant;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Cube, Flex};
use burn::tensor::{FloatDType, Shape};
use bytes::Bytes;
use fsdp_core::{Dtype, OpKind, OpTag, Phase, PlannedParam, ShardLayout, SpanKind, UnitIndex};

use super::execute::sum_over_replicas;
use super::{Engine, Gathered, State, Whole};
use crate::Error;
use crate::block::Block;
use crate::cube::to_device;
use crate::host;
use crate::peers::{CubeFloat, DeviceLinks, Peers, Ticket, block, cut, flat_block, flat_whole, whole};

impl Engine {
    fn devices(&self) -> &DeviceLinks {
        match &self.links.devices {
            Some(devices) => devices,
            None => unreachable!("asked for where tensors stay on devices"),
        }
    }

    /// Counts an operation of `peers` that was started, over blocks of these layouts and element types.
    fn count<'a>(&self, kind: OpKind, tag: &OpTag, rank: usize, parts: impl Iterator<Item = (&'a ShardLayout, Dtype)>) {
        let parts = parts.map(|(layout, dtype)| (layout, dtype.size_bytes()));
        self.devices().traffic.count(kind, tag, rank, parts);
    }

    /// Starts to gather the unit on the device, from this rank's blocks, which are copied there where they are not.
    pub(super) fn start_exchange(&self, state: &mut State, unit: UnitIndex) -> Result<(), Error> {
        let params: Vec<_> = self.cut_params(unit).map(|(param, spec)| (param, spec.layout.clone())).collect();
        let mut flats = Vec::with_capacity(params.len());
        for (param, layout) in params {
            let (master, compute) = (self.dtypes.master[param], self.dtypes.compute[param]);
            let own = self.take_stored(state, param)?.cast(master, compute);
            flats.push(self.flat(own, &layout, compute));
        }
        let phase = if state.in_backward { Phase::Backward } else { Phase::Forward };
        let tag = self.tag(state, phase, unit);
        let ticket = self.devices().gather.start(OpKind::AllGather, tag.clone(), flats)?;
        let parts = self.cut_params(unit).map(|(param, spec)| (&spec.layout, self.dtypes.compute[param]));
        self.count(OpKind::AllGather, &tag, self.shard_index, parts);
        state.units[unit].gathered = Gathered::Exchanging { ticket, again: false };
        state.held.gathered += self.plan.gathered_bytes(unit, &self.dtypes.compute);
        state.note();
        Ok(())
    }

    pub(super) fn finish_exchange(
        &self,
        state: &mut State,
        unit: UnitIndex,
        ticket: Ticket,
        again: bool,
    ) -> Result<Gathered, Error> {
        let begun = Instant::now();
        let peers = if again { self.neighbours() } else { self.devices().gather.as_ref() };
        let flats = peers.finish(ticket)?;
        let full = self.cut_params(unit).zip(flats).map(|((param, spec), flat)| match &self.links.regather {
            Some(group) if again => whole(flat, &self.regather_layout(param, group.as_ref()).0),
            _ => whole(flat, &spec.layout),
        });
        let full = full.collect();
        self.stood_still(state, SpanKind::Gather, unit, begun);
        Ok(Gathered::OnDevice(full))
    }

    fn neighbours(&self) -> &dyn Peers {
        match &self.devices().regather {
            Some(neighbours) => neighbours.as_ref(),
            None => unreachable!("the schedule reshards where there is a smaller group"),
        }
    }

    /// Keeps this rank's blocks of the smaller group, so that the gathered unit can go.
    pub(super) fn reshard_on_device(&self, unit: UnitIndex, full: Vec<CubeFloat>) -> Vec<Block> {
        let Some(group) = &self.links.regather else { unreachable!("there is a smaller group") };
        let block = |((param, _), full): ((usize, &PlannedParam), CubeFloat)| {
            let (layout, index) = self.regather_layout(param, group.as_ref());
            match layout.shard_len(index) {
                0 => Block::nothing(),
                // A part of it would hold all of it; the product is a tensor of its own.
                _ => Block::Device(Box::new(Cube::float_mul_scalar(cut(full, &layout, index), 1.0.into()))),
            }
        };
        self.cut_params(unit).zip(full).map(block).collect()
    }

    /// Gathers them again.
    pub(super) fn start_exchange_again(
        &self,
        state: &mut State,
        unit: UnitIndex,
        blocks: Vec<Block>,
    ) -> Result<(), Error> {
        let Some(group) = &self.links.regather else { unreachable!("there is a smaller group") };
        let layouts: Vec<_> = self
            .cut_params(unit)
            .map(|(param, _)| (self.regather_layout(param, group.as_ref()).0, self.dtypes.compute[param]))
            .collect();
        let flats = layouts.iter().zip(blocks).map(|((layout, dtype), block)| self.flat(block, layout, *dtype));
        let phase = if state.in_backward { Phase::Backward } else { Phase::Forward };
        let tag = self.tag(state, phase, unit);
        let ticket = self.neighbours().start(OpKind::AllGather, tag.clone(), flats.collect())?;
        let parts = layouts.iter().map(|(layout, dtype)| (layout, *dtype));
        self.count(OpKind::AllGather, &tag, group.rank(), parts);
        state.units[unit].gathered = Gathered::Exchanging { ticket, again: true };
        state.held.gathered += self.plan.gathered_bytes(unit, &self.dtypes.compute);
        state.note();
        Ok(())
    }

    /// The same for updated blocks, of which all ranks have the whole from then on.
    pub(super) fn start_publish_on_devices(&self, state: &mut State, unit: UnitIndex) -> Result<(), Error> {
        let flat = |(param, spec): (usize, &PlannedParam)| {
            self.flat(self.to_publish(param, spec, state), &spec.layout, self.dtypes.compute[param])
        };
        let flats: Vec<_> = self.split_trainable(unit).map(flat).collect();
        if !flats.is_empty() {
            let tag = self.tag(state, Phase::Optimizer, unit);
            let ticket = self.devices().gather.start(OpKind::AllGather, tag.clone(), flats)?;
            let parts = self.split_trainable(unit).map(|(param, spec)| (&spec.layout, self.dtypes.compute[param]));
            self.count(OpKind::AllGather, &tag, self.shard_index, parts);
            state.units[unit].publishing_on_devices = Some(ticket);
        }
        Ok(())
    }

    pub(super) fn finish_publish_on_devices(&self, state: &mut State, unit: UnitIndex) -> Result<(), Error> {
        let Some(ticket) = state.units[unit].publishing_on_devices.take() else { return Ok(()) };
        let begun = Instant::now();
        let flats = self.devices().gather.finish(ticket)?;
        for ((param, spec), flat) in self.split_trainable(unit).zip(flats) {
            state.store(param, Block::Device(Box::new(whole(flat, &spec.layout))));
        }
        self.stood_still(state, SpanKind::Publish, unit, begun);
        Ok(())
    }

    pub(super) fn start_reduce_on_devices(&self, state: &mut State, unit: UnitIndex) -> Result<(), Error> {
        // What an earlier micro-batch has left is added to.
        self.fetch_gradients(state, unit);
        let (mut split, mut together) = (Vec::new(), Vec::new());
        let mut bytes = 0;
        let params: Vec<_> = self.trainable(unit).map(|(param, spec)| (param, spec.clone())).collect();
        for (param, spec) in params {
            let dtype = self.dtypes.reduce[param];
            let layout = self.reduced_layout(&spec);
            bytes += layout.full_len() * dtype.size_bytes();
            let local = state.local[param].take();
            state.held.local -= local.as_ref().map_or(0, Whole::size_bytes);
            let flat = match local {
                None => {
                    let len = layout.padded_len() * layout.num_shards();
                    // See [Note: A missing gradient is minus zero].
                    let shape = Shape::from(vec![len]);
                    Cube::float_full(shape, (-0.0).into(), &self.devices().device, host::float_dtype(dtype))
                }
                Some(Whole::OnDevice(gradient)) => self.present(*gradient, &layout, host::float_dtype(dtype)),
                Some(other) => {
                    let data = Flex::float_cast(other.wait()?, host::float_dtype(dtype)).into_data();
                    self.home().note_to_device(data.bytes().len());
                    self.present(to_device(data, &self.devices().device), &layout, host::float_dtype(dtype))
                }
            };
            if spec.is_split() { split.push(flat) } else { together.push(flat) }
        }
        let tag = self.tag(state, Phase::Backward, unit);
        let devices = self.devices();
        let mut tickets = [None, None];
        if !split.is_empty() {
            tickets[0] = Some(devices.reduce.start(OpKind::ReduceScatter, tag.clone(), split)?);
            let parts = self.split_trainable(unit).map(|(param, spec)| (&spec.layout, self.dtypes.reduce[param]));
            self.count(OpKind::ReduceScatter, &tag, self.shard_index, parts);
        }
        if !together.is_empty() {
            tickets[1] = Some(devices.over_all().start(OpKind::AllReduce, tag.clone(), together)?);
            let layouts: Vec<_> = self
                .whole_trainable(unit)
                .map(|(param, spec)| (self.over_world(spec.layout.shape()), self.dtypes.reduce[param]))
                .collect();
            let parts = layouts.iter().map(|(layout, dtype)| (layout, *dtype));
            self.count(OpKind::AllReduce, &tag, self.links.control.rank(), parts);
        }
        state.units[unit].exchanging = Some(tickets);
        state.units[unit].reducing_bytes = bytes;
        state.held.reducing += bytes;
        state.note();
        Ok(())
    }

    /// The sums: of split parameters this rank's blocks, then the whole ones. Along `replicate` they are added up here, as
    /// `ReduceJob::run` adds them up in host memory.
    pub(super) fn finish_reduce_on_devices(
        &self,
        state: &mut State,
        unit: UnitIndex,
        [split, together]: [Option<Ticket>; 2],
    ) -> Result<Vec<Block>, Error> {
        let begun = Instant::now();
        let devices = self.devices();
        let mut sums = Vec::new();
        if let Some(ticket) = split {
            let mut flats = devices.reduce.finish(ticket)?;
            let params: Vec<_> = self.split_trainable(unit).collect();
            let mut scale = self.reduce().scale;
            if let Some(beyond) = &devices.beyond {
                let is_half = params.iter().any(|&(param, _)| self.dtypes.reduce[param].size_bytes() < 4);
                let num_shards = if is_half { self.links.reduce_shard.world_size() as f64 } else { 1.0 };
                let partial = |(flat, &(param, _)): (CubeFloat, &(usize, &PlannedParam))| {
                    let dtype = self.dtypes.reduce[param];
                    let mean = scaled(flat, num_shards.recip(), dtype);
                    Cube::float_cast(mean, host::float_dtype(sum_over_replicas(dtype)))
                };
                let partials = flats.into_iter().zip(&params).map(partial).collect();
                let tag = self.tag(state, Phase::Backward, unit);
                let ticket = beyond.replicas.start(OpKind::AllReduce, tag.clone(), partials)?;
                flats = beyond.replicas.finish(ticket)?;
                scale *= num_shards;
                if let Some(replicas) = &self.links.reduce_replicas {
                    let len = |spec: &PlannedParam| spec.layout.shard_len(self.shard_index);
                    let layout = |spec| ShardLayout::new(&[len(spec)], 0, replicas.world_size());
                    let layouts = params.iter().map(|&(param, spec)| (layout(spec), self.dtypes.reduce[param]));
                    let layouts: Vec<_> = layouts.collect();
                    let parts = layouts.iter().map(|(layout, dtype)| (layout, sum_over_replicas(*dtype)));
                    self.count(OpKind::AllReduce, &tag, replicas.rank(), parts);
                }
            }
            for ((param, spec), flat) in params.into_iter().zip(flats) {
                let dtype = match &devices.beyond {
                    Some(_) => sum_over_replicas(self.dtypes.reduce[param]),
                    None => self.dtypes.reduce[param],
                };
                sums.push(match spec.layout.shard_len(self.shard_index) {
                    0 => Block::nothing(),
                    _ => {
                        let sum = block(scaled(flat, scale, dtype), &spec.layout, self.shard_index);
                        Block::Device(Box::new(sum))
                    }
                });
            }
        }
        if let Some(ticket) = together {
            for ((param, spec), flat) in self.whole_trainable(unit).zip(devices.over_all().finish(ticket)?) {
                let layout = self.reduced_layout(spec);
                sums.push(match layout.full_len() {
                    0 => Block::nothing(),
                    _ => {
                        let sum = whole(scaled(flat, self.reduce().scale, self.dtypes.reduce[param]), &layout);
                        Block::Device(Box::new(sum))
                    }
                });
            }
        }
        self.stood_still(state, SpanKind::Reduce, unit, begun);
        Ok(sums)
    }

    /// One row of elements, as a sum over all ranks cuts it.
    fn over_world(&self, shape: &[usize]) -> ShardLayout {
        ShardLayout::new(shape, 0, self.links.control.world_size())
    }

    /// How a reduction cuts a parameter. What is not split is one row of elements, which need not be padded.
    fn reduced_layout(&self, spec: &PlannedParam) -> ShardLayout {
        match spec.is_split() {
            true => spec.layout.clone(),
            false => ShardLayout::new(spec.layout.shape(), 0, 1),
        }
    }

    /// A gradient in the type that it is sent in, without a negative zero: see [Note: A missing gradient is minus zero].
    fn present(&self, gradient: CubeFloat, layout: &ShardLayout, dtype: FloatDType) -> CubeFloat {
        flat_whole(Cube::float_add_scalar(Cube::float_cast(gradient, dtype), 0.0.into()), layout)
    }

    /// This rank's block on the device: row by row of the dimension that is cut, and padded.
    fn flat(&self, own: Block, layout: &ShardLayout, dtype: Dtype) -> CubeFloat {
        let len = layout.padded_len();
        let device = &self.devices().device;
        let own = match own {
            Block::Device(block) => return flat_block(*block, layout),
            Block::Host(own) if own.is_empty() => {
                return Cube::float_zeros(Shape::from(vec![len]), device, host::float_dtype(dtype));
            }
            Block::Host(own) => own,
        };
        let turned = match layout.dim() {
            0 => own,
            dim => {
                let tensor = host::flex_tensor(own, &layout.shard_shape(self.shard_index), dtype);
                host::bytes_of(&Flex::float_swap_dims(tensor, 0, dim))
            }
        };
        let num_bytes = len * dtype.size_bytes();
        let padded = match turned.len() == num_bytes {
            true => turned,
            false => {
                let mut padded = turned.to_vec();
                padded.resize(num_bytes, 0);
                Bytes::from(padded)
            }
        };
        self.home().note_to_device(padded.len());
        to_device(host::tensor_data(padded, &[len], dtype), device)
    }
}

/// A sum times `scale`, in `dtype`. Of two bytes it is rounded once, after all.
fn scaled(flat: CubeFloat, scale: f64, dtype: Dtype) -> CubeFloat {
    let flat = if dtype.size_bytes() < 4 { Cube::float_cast(flat, FloatDType::F32) } else { flat };
    // Multiplying by 1 changes nothing but the time it takes.
    let flat = if scale == 1.0 { flat } else { Cube::float_mul_scalar(flat, scale.into()) };
    Cube::float_cast(flat, host::float_dtype(dtype))
}
