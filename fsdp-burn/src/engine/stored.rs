//! What is stored of a parameter between its uses, and what the optimizer steps of it.

use bytes::Bytes;
use fsdp_core::Dtype;

use super::{Engine, State};
use crate::Error;
use crate::block::{Block, Place};
use crate::host;

impl State {
    pub(super) fn store(&mut self, param: usize, block: Block) {
        self.held.stored = self.held.stored - self.stored[param].size_bytes() + block.size_bytes();
        self.stored[param] = block;
        self.placed[param] = None;
    }

    pub(super) fn keep_master(&mut self, param: usize, block: Block) {
        let new_bytes = block.size_bytes();
        let old = self.masters[param].replace(block);
        self.held.stored = self.held.stored - old.map_or(0, |old| old.size_bytes()) + new_bytes;
    }
}

impl Engine {
    /// Element type of what is stored of a parameter.
    pub(crate) fn stored_dtype(&self, param: usize) -> Dtype {
        if self.has_master(param) { self.dtypes.compute[param] } else { self.dtypes.master[param] }
    }

    /// What is stored of a parameter in memory.
    pub(crate) fn stored(&self, param: usize) -> Block {
        self.lock().stored[param].clone()
    }

    /// Takes a value of the parameter: whole where it is resident, else this rank's block, in the optimizer's type.
    pub(crate) fn set_value(&self, param: usize, value: Bytes) {
        let mut state = self.lock();
        let (shape, master) = (self.stored_shape(param), self.dtypes.master[param]);
        if !self.has_master(param) {
            return state.store(param, self.home().take_in(value, self.stored_place(param), &shape, master));
        }
        let spec = &self.plan.params()[param];
        let compute = self.dtypes.compute[param];
        let rounded = Block::Host(host::cast(&value, master, compute));
        state.store(param, self.home().to_device(rounded, &shape, compute));
        let block = match spec.is_split() {
            // A copy, so that the whole value can go.
            true => Bytes::from(host::cut(&value, &spec.layout, self.shard_index, master.size_bytes()).to_vec()),
            false => value,
        };
        let place = self.offload.state_place(param);
        state.keep_master(param, self.home().take_in(block, place, &self.block_shape(param), master));
    }

    /// Takes the optimizer's new view of a parameter, in the memory where it was stepped. At stages 1 and 2 others have to be
    /// told before it can be used.
    pub(crate) fn set_stepped(&self, param: usize, block: Block) -> Result<(), Error> {
        let mut state = self.lock();
        // At stages 1 and 2 the whole one is on its way.
        let is_published = self.plan.params()[param].is_split() && self.plan.is_resident(&self.plan.params()[param]);
        let (shape, master, compute) =
            (self.stored_shape(param), self.dtypes.master[param], self.dtypes.compute[param]);
        let place = self.stored_place(param);
        match (self.has_master(param), is_published) {
            (false, true) => state.store(param, block),
            (false, false) => state.store(param, self.home().put(block, place, &shape, master)?),
            (true, true) => {
                state.store(param, Block::nothing());
                state.keep_master(param, block);
            }
            (true, false) => {
                let rounded = block.clone().cast(master, compute);
                state.store(param, self.home().put(rounded, place, &shape, compute)?);
                state.keep_master(param, block);
            }
        }
        Ok(())
    }

    /// Shape of what is stored of a parameter.
    pub(crate) fn stored_shape(&self, param: usize) -> Vec<usize> {
        let spec = &self.plan.params()[param];
        match self.plan.is_resident(spec) {
            true => spec.layout.shape().to_vec(),
            false => spec.layout.shard_shape(self.shard_index),
        }
    }

    /// Where it lies. What is used in whole lies where it is used.
    fn stored_place(&self, param: usize) -> Place {
        match self.plan.is_resident(&self.plan.params()[param]) {
            true => Place::Device,
            false => self.offload.parameter_place(param),
        }
    }

    /// Whether the optimizer steps something else than what is stored. See [Note: Masters and what is computed with].
    pub(super) fn has_master(&self, param: usize) -> bool {
        self.plan.is_resident(&self.plan.params()[param]) && self.dtypes.compute[param] != self.dtypes.master[param]
    }
}
