//! The optimizer of a sharded model: any elementwise Burn optimizer, stepping blocks.
//!
//! Each rank steps its own block of every cut parameter, so optimizer state exists once over all ranks. A rank with a device
//! steps it there, unless `[offload]` puts the state into host memory or on a disk: then the step is in host memory. Burn's
//! [`ModuleOptimizer`] does the arithmetic; it is shown a module of blocks with the paths and ids of the model, unit by
//! unit, as soon as a unit's gradients are reduced.

use std::sync::Arc;

use burn::grad_clipping::GradientClipping;
use burn::module::Module;
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::optim::{GradientsParams, ModuleOptimizer, OptimizerRecord};
use burn::store::RecordError;
use fsdp_core::{Action, Axis, Config, NonFinite, SpanKind, UnitIndex};

use crate::block::Block;
use crate::clip::{self, Norm};
use crate::engine::Engine;
use crate::offload::{Away, AwayStates};
use crate::shard_module::{BlockTensor, NamedBlock, Ranked, ShardModule};
use crate::survey::Entry;
use crate::{Error, ShardedGradients, ShardedModel, elementwise, host};

/// What a call of [`ShardedOptimizer::step`] did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StepOutcome {
    /// The gradients were added to those of earlier micro-batches, or there were none; no parameter changed.
    Accumulated,
    /// Parameters changed.
    Stepped {
        /// The global gradient norm before clipping, unless nothing asks for it (`non_finite = "propagate"`, no clipping).
        gradient_norm: Option<f64>,
    },
    /// The global gradient norm was not finite, and nothing changed (`non_finite = "skip"`, or a dynamic loss scale that
    /// was too large and is smaller from now on).
    Skipped {
        /// The norm.
        gradient_norm: f64,
    },
}

/// An optimizer over sharded models. Made by [`Rank::optimizer`](crate::Rank::optimizer).
///
/// Memory: the state of this rank's blocks; 1/N of what the optimizer would hold, from stage 1 on.
pub struct ShardedOptimizer {
    /// Without any state.
    blank: ModuleOptimizer,
    /// By unit, with the state that is in memory.
    here: Vec<ModuleOptimizer>,
    /// State that is on the disk.
    away: AwayStates,
    name: &'static str,
    clip_norm: Option<f64>,
    norm: Norm,
    clip_value: Option<f64>,
    non_finite: NonFinite,
    /// The models that the optimizer was tried out for, by the address of their engine, and the generation of what they
    /// train.
    checked: Vec<(usize, usize)>,
}

impl ShardedOptimizer {
    pub(crate) fn new<O: Into<ModuleOptimizer>>(optimizer: O, config: &Config) -> Result<Self, Error> {
        let inner: ModuleOptimizer = optimizer.into();
        if !inner.to_record().is_empty() {
            return Err(Error::Misuse {
                problem:
                    "the optimizer has state already, of whole parameters, from which this rank's blocks cannot go on"
                        .into(),
                remedy: "give it without state, and go on from a checkpoint with `ShardedModel::load`",
            });
        }
        let splits = config.stage.shards_optimizer() && config.resolved_mesh().size(Axis::Shard) > 1;
        if let (true, Some(GradientClipping::Norm(threshold))) = (splits, inner.grad_clipping()) {
            return Err(Error::NormClipping { threshold: *threshold });
        }
        Ok(Self {
            blank: inner.clone().load_record(OptimizerRecord::default()),
            here: Vec::new(),
            away: AwayStates::default(),
            name: elementwise::short_type_name::<O>(),
            clip_norm: config.training.gradient_clip_norm,
            norm: Norm::of_order(config.training.gradient_norm_order),
            clip_value: config.training.gradient_clip_value,
            non_finite: config.training.non_finite,
            checked: Vec::new(),
        })
    }

    /// Steps the model with the gradients of its last backward; with gradient accumulation, every k-th call does.
    /// *Collective.*
    ///
    /// `lr` is a learning rate, or Burn's rates by parameter group. Gradients are averaged over micro-batches unless
    /// the configuration says sum. After it, running statistics are what the configuration's `buffers` says.
    ///
    /// # Errors
    /// If the optimizer needs whole tensors and a parameter is split; if the global gradient norm is not finite and
    /// the configuration calls that an error; if a collective fails.
    pub fn step<M: Module>(
        &mut self,
        lr: impl Into<ModuleLearningRate>,
        model: &mut ShardedModel<M>,
        gradients: ShardedGradients,
    ) -> Result<StepOutcome, Error> {
        if !gradients.are_of(model.engine()) {
            return Err(Error::Misuse {
                problem: "the gradients come from another model than the one to be stepped".into(),
                remedy: "give each model the gradients that its own `backward` returned",
            });
        }
        drop(gradients);
        let (_, backwards) = model.engine().progress();
        if backwards < model.engine().accumulation() {
            return Ok(StepOutcome::Accumulated);
        }
        self.apply(lr.into(), model)
    }

    /// Steps with the micro-batches that an incomplete last window has gathered; does nothing if there are none.
    /// *Collective.*
    ///
    /// # Errors
    /// As [`ShardedOptimizer::step`].
    pub fn flush<M: Module>(
        &mut self,
        lr: impl Into<ModuleLearningRate>,
        model: &mut ShardedModel<M>,
    ) -> Result<StepOutcome, Error> {
        match model.engine().progress() {
            (_, 0) => Ok(StepOutcome::Accumulated),
            _ => self.apply(lr.into(), model),
        }
    }

    /// The state that is in memory, as Burn records it, one unit after the other.
    pub(crate) fn record_bytes(&self) -> impl Iterator<Item = Result<burn::tensor::Bytes, RecordError>> {
        self.here.iter().map(ModuleOptimizer::into_bytes)
    }

    /// Goes on from this state in memory, by unit. What is on the disk is forgotten.
    pub(crate) fn load_records(&mut self, engine: &Arc<Engine>, records: Vec<OptimizerRecord>) {
        self.here = records.into_iter().map(|record| self.blank.clone().load_record(record)).collect();
        self.away.forget(address(engine));
    }

    /// Goes on from this state of one unit's offloaded parameters.
    pub(crate) fn load_away(
        &mut self,
        engine: &Arc<Engine>,
        unit: UnitIndex,
        record: OptimizerRecord,
    ) -> Result<(), Error> {
        let Some(tier) = engine.offload().tier() else { return Ok(()) };
        let away = self.away.unit(address(engine), unit);
        away.put(self.blank.clone().load_record(record))?;
        away.write(tier)?;
        match away.take_writing() {
            Some((writing, _)) => Ok(writing.wait()?),
            None => Ok(()),
        }
    }

    /// State that is on the disk, by unit.
    pub(crate) fn away(&self, engine: &Arc<Engine>) -> impl Iterator<Item = &Away> {
        self.away.of_engine(address(engine))
    }

    /// The same as Burn records it, one unit after the other.
    pub(crate) fn away_records(
        &self,
        engine: &Arc<Engine>,
    ) -> impl Iterator<Item = Result<burn::tensor::Bytes, Error>> {
        let slots: Vec<_> = self.away(engine).filter_map(Away::stored).collect();
        let tier = engine.offload().tier().cloned();
        let read = move |slot| tier.as_ref().map(|tier| Ok(host::burn_bytes(tier.read(slot).wait()?)));
        slots.into_iter().filter_map(read)
    }

    /// The state that is in memory, by unit. Costs nothing: tensors are shared, and a step that finds them so writes its
    /// results elsewhere.
    pub(crate) fn shared(&self) -> Vec<ModuleOptimizer> {
        self.here.clone()
    }

    /// The optimizer of a unit's state in memory.
    fn here(&mut self, unit: UnitIndex) -> &mut ModuleOptimizer {
        if self.here.len() <= unit {
            self.here.resize(unit + 1, self.blank.clone());
        }
        &mut self.here[unit]
    }

    /// Whether it has stepped no other model.
    pub(crate) fn is_for(&self, engine: &Arc<Engine>) -> bool {
        self.checked.iter().all(|&(checked, _)| checked == address(engine))
    }

    fn apply<M: Module>(&mut self, lr: ModuleLearningRate, model: &mut ShardedModel<M>) -> Result<StepOutcome, Error> {
        let engine = model.engine().clone();
        let (step, _) = engine.progress();
        let entries = model.planned_entries();
        let model_state = (address(&engine), engine.generation());
        if !self.checked.contains(&model_state) {
            elementwise::check(&self.blank, self.name, model.plan(), &entries)?;
            self.checked.push(model_state);
        }
        engine.reduce_rest()?;
        engine.agree_on_gradients()?;
        let mut factor = engine.gradient_factor();
        let mut gradient_norm = None;
        let scales = engine.scaler().is_some_and(|scaler| scaler.is_dynamic());
        if self.clip_norm.is_some() || self.non_finite != NonFinite::Propagate || scales {
            engine.finish_reduces()?;
            let norm = clip::global_norm(&engine, step, self.norm)? * factor;
            gradient_norm = Some(norm);
            let overflowed = engine.overflowed(norm.is_finite());
            match self.non_finite {
                _ if norm.is_finite() => factor *= self.clip_norm.map_or(1.0, |most| clip::coefficient(norm, most)),
                NonFinite::Propagate if !overflowed => factor = f64::NAN,
                NonFinite::Error if !overflowed => {
                    engine.discard_gradients();
                    engine.end_step();
                    return Err(Error::NonFinite { step, norm });
                }
                _ => {
                    engine.discard_gradients();
                    engine.end_step();
                    model.agree_on_buffers()?;
                    return Ok(StepOutcome::Skipped { gradient_norm: norm });
                }
            }
        }
        model.while_let_go(|| {
            for action in engine.step_actions() {
                match action {
                    Action::Step(unit) => {
                        engine.stepping(unit, || {
                            self.step_unit(&lr, &engine, &entries, unit, factor)?;
                            engine.place(unit)
                        })?;
                    }
                    other => {
                        self.move_state(&engine, other)?;
                        engine.execute(other)?;
                    }
                }
            }
            Ok(())
        })?;
        engine.end_step();
        model.agree_on_buffers()?;
        Ok(StepOutcome::Stepped { gradient_norm })
    }

    /// Steps the blocks of one unit that have a gradient.
    fn step_unit(
        &mut self,
        lr: &ModuleLearningRate,
        engine: &Arc<Engine>,
        entries: &[Entry],
        unit: UnitIndex,
        factor: f64,
    ) -> Result<(), Error> {
        let params: Vec<_> = engine.params_of(unit).map(|(param, _)| param).collect();
        let (mut away, here): (Vec<_>, Vec<_>) =
            params.into_iter().partition(|&param| engine.offload().has_state(param));
        // What is frozen leaves its state where it is.
        away.retain(|&param| engine.is_trained(param));
        let work = Work { lr, engine, entries, factor, clip_value: self.clip_value };
        work.step(self.here(unit), &here)?;
        if let (false, Some(tier)) = (away.is_empty(), engine.offload().tier()) {
            let state = self.away.unit(address(engine), unit);
            let wait = |reading, bytes| engine.wait_state(unit, SpanKind::Read, bytes, reading);
            let mut optimizer = state.take(&self.blank, tier, wait)?;
            work.step(&mut optimizer, &away)?;
            state.put(optimizer)?;
        }
        Ok(())
    }

    /// The optimizer's part of an action that fetches or writes back.
    fn move_state(&mut self, engine: &Arc<Engine>, action: Action) -> Result<(), Error> {
        let Some(tier) = engine.offload().tier() else { return Ok(()) };
        match action {
            // State of what is frozen stays where it is.
            Action::FetchState(unit) => {
                let steps = |param| engine.offload().has_state(param) && engine.is_trained(param);
                if engine.params_of(unit).any(|(param, _)| steps(param)) {
                    self.away.unit(address(engine), unit).fetch(tier);
                }
            }
            Action::WriteBack(unit) => self.away.unit(address(engine), unit).write(tier)?,
            Action::WaitWriteBack(unit) => {
                if let Some((writing, bytes)) = self.away.unit(address(engine), unit).take_writing() {
                    engine.wait_state(unit, SpanKind::Write, bytes, writing)?;
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// What stays the same over the units of a step.
struct Work<'a> {
    lr: &'a ModuleLearningRate,
    engine: &'a Engine,
    entries: &'a [Entry],
    factor: f64,
    clip_value: Option<f64>,
}

impl Work<'_> {
    /// Steps the blocks of those parameters that have a gradient.
    fn step(&self, optimizer: &mut ModuleOptimizer, params: &[usize]) -> Result<(), Error> {
        let Self { engine, factor, clip_value, .. } = *self;
        let mut stepped = Vec::new();
        let mut module = ShardModule { blocks: Vec::new() };
        let mut gradients = GradientsParams::new();
        for &param in params {
            let Some(gradient) = engine.take_reduced(param)? else { continue };
            let (entry, shape, dtype) = (&self.entries[param], engine.block_shape(param), engine.dtype(param));
            // What is stepped on the way to a disk is stepped in host memory.
            let place = engine.offload().state_place(param);
            let tensor = |block: Block| {
                let block = engine.home().put(block, place, &shape, dtype)?;
                Ok::<_, Error>(BlockTensor { block, shape: &shape, dtype, factor: 1.0, clip_value: None })
            };
            let block = tensor(engine.block(param)?)?;
            let gradient = BlockTensor { factor, clip_value, ..tensor(gradient)? };
            module.blocks.push(NamedBlock { path: entry.spec.path.clone(), param: Ranked::new(entry.id, block) });
            Ranked::new(entry.id, gradient).register(&mut gradients);
            stepped.push(param);
        }
        let module = optimizer.step(self.lr.clone(), module, gradients);
        for (param, block) in stepped.into_iter().zip(module.blocks) {
            engine.set_stepped(param, block.param.into_block())?;
        }
        Ok(())
    }
}

/// What an engine is known by.
fn address(engine: &Arc<Engine>) -> usize {
    Arc::as_ptr(engine).addr()
}
