//! Where the parameters of one unit are, and which transitions there are between.

/// Where the parameters of a unit are.
///
/// ```text
///            gather             arrived             reshard
///  Sharded ----------> Gathering --------> Gathered ---------> Resharded
///     ^                  |   ^                 |                 |   |
///     |                  |   +-----------------|-----------------+   |
///     +------------------+---------------------+---------------------+
///                                    free
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnitState {
    /// Only this rank's block is here.
    Sharded,
    /// The all-gather is under way.
    Gathering,
    /// The whole unit is here.
    Gathered,
    /// The block of a smaller group of ranks is here, from which the unit is gathered again.
    Resharded,
}

/// A transition that the diagram of [`UnitState`] does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a unit that is {from:?} cannot {call}")]
pub struct WrongOrder {
    /// The state that refused.
    pub from: UnitState,
    /// What was asked of it.
    pub call: &'static str,
}

impl UnitState {
    /// Starts a gather.
    ///
    /// # Errors
    /// If the unit is gathered or being gathered already: it would be sent twice.
    pub fn gather(&mut self) -> Result<(), WrongOrder> {
        match self {
            UnitState::Sharded | UnitState::Resharded => *self = UnitState::Gathering,
            _ => return Err(WrongOrder { from: *self, call: "start a gather" }),
        }
        Ok(())
    }

    /// The gather has arrived.
    ///
    /// # Errors
    /// If none was under way.
    pub fn arrived(&mut self) -> Result<(), WrongOrder> {
        match self {
            UnitState::Gathering => *self = UnitState::Gathered,
            _ => return Err(WrongOrder { from: *self, call: "finish a gather" }),
        }
        Ok(())
    }

    /// Drops the gathered copy but for a block of it.
    ///
    /// # Errors
    /// If the unit is not gathered.
    pub fn reshard(&mut self) -> Result<(), WrongOrder> {
        match self {
            UnitState::Gathered => *self = UnitState::Resharded,
            _ => return Err(WrongOrder { from: *self, call: "be resharded" }),
        }
        Ok(())
    }

    /// Drops the gathered copy, or what is left of it.
    ///
    /// # Errors
    /// If there is none.
    pub fn free(&mut self) -> Result<(), WrongOrder> {
        match self {
            UnitState::Sharded => return Err(WrongOrder { from: *self, call: "be freed" }),
            _ => *self = UnitState::Sharded,
        }
        Ok(())
    }
}
