//! Blocks whose place is in the buffer that gathers hand out. See [Note: Gathers without a copy].

use fsdp_core::{Phase, PlacedPart, Plan, UnitIndex};

use super::{Engine, State};
use crate::Error;
use crate::block::Block;

impl Engine {
    /// Puts the blocks of a unit that may have changed to where gathers need no copy of them, if there is such a place.
    /// *Collective.*
    ///
    /// Left where they are: what is gathered in another type than it is stored in, what is offloaded to a disk or lies on a
    /// device, and what is gathered again among a smaller group.
    pub(crate) fn place(&self, unit: UnitIndex) -> Result<(), Error> {
        let mut state = self.lock();
        // A rank without a part of a parameter does not know whether it was stepped, so all are placed that may have been.
        let may_have_changed = |param: &usize| state.placed[*param].is_none() || self.is_trained(*param);
        let params = self.cut_params(unit).map(|(param, _)| param).filter(|&param| self.can_be_placed(param));
        let params: Vec<_> = params.filter(may_have_changed).collect();
        if params.is_empty() {
            return Ok(());
        }
        let part = |&param: &usize| {
            let block = self.home().to_host(state.stored[param].clone())?;
            Ok(self.gather_part(param, block, self.dtypes.compute[param]))
        };
        let parts = params.iter().map(part).collect::<Result<Vec<_>, Error>>()?;
        let placed = self.links.place.place(&self.tag(&state, Phase::Optimizer, unit), &parts)?;
        for (param, placed) in params.into_iter().zip(placed.into_iter().flatten()) {
            state.store(param, Block::Host(placed.shard().clone()));
            state.placed[param] = Some(placed);
        }
        Ok(())
    }

    /// As [`Engine::place`], of all units.
    pub(crate) fn place_all(&self) -> Result<(), Error> {
        (0..self.plan.units().len()).try_for_each(|unit| self.place(unit))
    }

    /// The blocks that a gather of the unit asks for, if all of them are placed.
    pub(super) fn placed(&self, state: &State, unit: UnitIndex) -> Option<Vec<PlacedPart>> {
        self.cut_params(unit).map(|(param, _)| state.placed[param].clone()).collect()
    }

    /// Whether all that is gathered on use lies in place.
    pub(super) fn gathers_in_place(&self, plan: &Plan) -> bool {
        let state = self.lock();
        let cut = plan.params().iter().enumerate().filter(|(_, spec)| !plan.is_resident(spec));
        let mut cut = cut.map(|(param, _)| state.placed[param].is_some()).peekable();
        cut.peek().is_some() && cut.all(|is_placed| is_placed)
    }

    /// The same on every rank.
    fn can_be_placed(&self, param: usize) -> bool {
        let is_gathered_again = self.links.regather.is_some();
        let is_cast = self.dtypes.compute[param] != self.dtypes.master[param];
        !is_gathered_again && !is_cast && !self.home().is_device() && !self.offload.moves_parameters()
    }
}
