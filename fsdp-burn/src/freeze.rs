//! Which parameters are trained, changed while training goes on.

use burn::module::{Module, ModuleMapper, Param, ParamGroup};
use burn::tensor::Tensor;

use crate::survey::Entry;
use crate::{Error, ShardedModel};

impl<M: Module> ShardedModel<M> {
    /// Freezes the parameters of a group: from the next forward on they have no gradient, no reduction and no step. Their
    /// optimizer state stays as it is, for the case that they are trained again. *Collective*, after a step and before the
    /// next forward.
    ///
    /// Paths are those of the plan, such as `blocks.0.up.weight`. A parameter in several fields (tied weights) is frozen if one
    /// of them is in the group. Cost: the next step learns the order of units anew, so it gathers nothing ahead.
    ///
    /// # Errors
    /// If gradients wait for a step, or nothing would be left to train; if a collective fails.
    ///
    /// ```
    /// use burn::{module::{Module, ParamGroup}, nn::{Linear, LinearConfig}};
    /// use fsdp_burn::{Config, Error, Sharded, launch};
    ///
    /// #[derive(Module, Debug, Sharded)]
    /// struct Model {
    ///     #[shard(unit)]
    ///     body: Linear,
    ///     #[shard(unit)]
    ///     head: Linear,
    /// }
    ///
    /// launch(&Config { world_size: 2, ..Config::default() }, |rank| {
    ///     let linear = || LinearConfig::new(4, 4).init(&rank.device());
    ///     let mut model = rank.shard(Model { body: linear(), head: linear() })?;
    ///     model.freeze(&ParamGroup::from_predicate("body"))?; // train the head first
    ///     assert!(!model.body.weight.is_require_grad());
    ///     model.unfreeze(&ParamGroup::all())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    pub fn freeze(&mut self, group: &ParamGroup) -> Result<(), Error> {
        self.set_trained(group, false)
    }

    /// Trains the parameters of a group, frozen ones included. *Collective*, as [`ShardedModel::freeze`].
    ///
    /// # Errors
    /// As [`ShardedModel::freeze`]. An optimizer that needs whole tensors refuses them at its next step.
    pub fn unfreeze(&mut self, group: &ParamGroup) -> Result<(), Error> {
        self.set_trained(group, true)
    }

    fn set_trained(&mut self, group: &ParamGroup, trained: bool) -> Result<(), Error> {
        let (_, backwards) = self.engine().progress();
        if backwards > 0 {
            return Err(Error::Misuse {
                problem: format!("parameters are frozen after {backwards} backwards whose gradients wait for a step"),
                remedy: "freeze and unfreeze after the optimizer's step, or flush it first",
            });
        }
        let mut flags: Vec<bool> = self.plan().params().iter().map(|param| param.trainable).collect();
        for (index, entry) in self.entries().iter().enumerate() {
            if let Some(param) = self.managed(index).filter(|_| group.matches(&entry.id, Some(&entry.path()))) {
                flags[param] = trained;
            }
        }
        if !flags.contains(&true) {
            return Err(Error::Misuse {
                problem: "no parameter of the model would be trained any more".into(),
                remedy: "leave at least one parameter that is not frozen; use `valid()` to evaluate",
            });
        }
        let plan = self.plan().with_trainable(|param| flags[param]);
        self.engine().train(&plan)?;
        self.replace_trained(plan, |module, entries, managed| {
            module.map(&mut Trained { entries, managed, flags: &flags, next: 0 })
        });
        Ok(())
    }
}

/// Gives the parameters of a module their training state.
struct Trained<'a> {
    entries: &'a mut [Entry],
    managed: &'a [Option<usize>],
    flags: &'a [bool],
    next: usize,
}

impl ModuleMapper for Trained<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let index = self.next;
        self.next += 1;
        let Some(managed) = self.managed[index] else { return param };
        self.entries[index].spec.trainable = self.flags[managed];
        param.set_require_grad(self.flags[managed])
    }
}
