//! Gathers and reductions from device to device. See [Note: Two places of a gather].

use std::time::Instant;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Cube, Flex};
use burn::tensor::FloatDType;
use bytes::Bytes;
use fsdp_core::{Dtype, OpKind, Phase, PlannedParam, ShardLayout, SpanKind, UnitIndex};

use super::missing::missing_gradient;
use super::{Engine, Gathered, State, Whole};
use crate::Error;
use crate::cube::{to_device, to_host};
use crate::host;
use crate::peers::{CubeFloat, DeviceLinks, Ticket, block, flat_whole, whole};

impl Engine {
    fn devices(&self) -> &DeviceLinks {
        match &self.links.devices {
            Some(devices) => devices,
            None => unreachable!("asked for where tensors stay on devices"),
        }
    }

    /// Copies this rank's blocks to its device and starts to gather the unit there.
    pub(super) fn start_exchange(&self, state: &mut State, unit: UnitIndex) -> Result<(), Error> {
        let params: Vec<_> = self.cut_params(unit).map(|(param, spec)| (param, spec.layout.clone())).collect();
        let mut flats = Vec::with_capacity(params.len());
        for (param, layout) in params {
            let (master, compute) = (self.dtypes.master[param], self.dtypes.compute[param]);
            let own = host::cast(&self.take_stored(state, param)?, master, compute);
            flats.push(self.flat(own, &layout, layout.padded_len(), compute));
        }
        let phase = if state.in_backward { Phase::Backward } else { Phase::Forward };
        let tag = self.tag(state, phase, unit);
        let ticket = self.devices().gather.start(OpKind::AllGather, tag, flats)?;
        state.units[unit].gathered = Gathered::Exchanging(ticket);
        state.held.gathered += self.plan.gathered_bytes(unit, &self.dtypes.compute);
        state.note();
        Ok(())
    }

    pub(super) fn finish_exchange(
        &self,
        state: &mut State,
        unit: UnitIndex,
        ticket: Ticket,
    ) -> Result<Gathered, Error> {
        let begun = Instant::now();
        let flats = self.devices().gather.finish(ticket)?;
        let full = self.cut_params(unit).zip(flats).map(|((_, spec), flat)| whole(flat, &spec.layout)).collect();
        self.stood_still(state, SpanKind::Gather, unit, begun);
        Ok(Gathered::OnDevice(full))
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
                    let nothing = missing_gradient(len, dtype);
                    to_device(host::tensor_data(nothing, &[len], dtype), &self.devices().device)
                }
                Some(Whole::OnDevice(gradient)) => self.present(*gradient, &layout, host::float_dtype(dtype)),
                Some(other) => {
                    let data = Flex::float_cast(other.wait()?, host::float_dtype(dtype)).into_data();
                    self.present(to_device(data, &self.devices().device), &layout, host::float_dtype(dtype))
                }
            };
            if spec.is_split() { split.push(flat) } else { together.push(flat) }
        }
        let reduce = &self.devices().reduce;
        let start = |kind, flats: Vec<CubeFloat>| match flats.is_empty() {
            true => Ok(None),
            false => reduce.start(kind, self.tag(state, Phase::Backward, unit), flats).map(Some),
        };
        let tickets = [start(OpKind::ReduceScatter, split)?, start(OpKind::AllReduce, together)?];
        state.units[unit].exchanging = Some(tickets);
        state.units[unit].reducing_bytes = bytes;
        state.held.reducing += bytes;
        state.note();
        Ok(())
    }

    /// Waits for the sums, and copies them to host memory: of split parameters this rank's blocks, then the whole ones.
    pub(super) fn finish_reduce_on_devices(
        &self,
        state: &mut State,
        unit: UnitIndex,
        tickets: [Option<Ticket>; 2],
    ) -> Result<Vec<Bytes>, Error> {
        let begun = Instant::now();
        let (split, together): (Vec<_>, Vec<_>) = self.trainable(unit).partition(|(_, spec)| spec.is_split());
        let mut sums = Vec::with_capacity(split.len() + together.len());
        for (ticket, params) in tickets.into_iter().zip([split, together]) {
            let Some(ticket) = ticket else { continue };
            for ((param, spec), flat) in params.into_iter().zip(self.devices().reduce.finish(ticket)?) {
                let layout = self.reduced_layout(spec);
                let (rank, dtype) = (self.shard_index, self.dtypes.reduce[param]);
                let len = if spec.is_split() { layout.shard_len(rank) } else { layout.full_len() };
                if len == 0 {
                    sums.push(Bytes::new());
                    continue;
                }
                let scale = self.reduce().scale;
                // Two bytes are rounded once, after all.
                let flat = if dtype.size_bytes() < 4 { Cube::float_cast(flat, FloatDType::F32) } else { flat };
                // Multiplying by 1 changes nothing but the time it takes.
                let flat = if scale == 1.0 { flat } else { Cube::float_mul_scalar(flat, scale.into()) };
                let flat = Cube::float_cast(flat, host::float_dtype(dtype));
                let sum = if spec.is_split() { block(flat, &layout, rank) } else { whole(flat, &layout) };
                sums.push(host::bytes_of(&to_host(sum)?));
            }
        }
        self.stood_still(state, SpanKind::Reduce, unit, begun);
        Ok(sums)
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

    /// A block of host memory on the device: row by row of the dimension that is cut, and padded.
    fn flat(&self, own: Bytes, layout: &ShardLayout, len: usize, dtype: Dtype) -> CubeFloat {
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
        to_device(host::tensor_data(padded, &[len], dtype), &self.devices().device)
    }
}
