//! Which element type each parameter is kept, computed and reduced in.
//!
//! [Note: Masters and what is computed with]
//! The optimizer changes a float32 *master*, so that a small update is not rounded away: a bf16 weight of 1 does not feel a
//! change below 1/256. What forward and backward use is its rounding, made on this rank's block before it is gathered, so
//! that half the bytes are sent. At stage 3 the block that the model stores is the master. Where the model stores whole
//! parameters, at stages 0 to 2, these are the rounded ones, and the engine keeps the master beside them, cut as the
//! optimizer's state is. Gradients are what autodiff makes of the rounded weights; they are sent in a type of their own and
//! added up, over ranks and over micro-batches, in float32.

use std::fmt;

use fsdp_core::{Dtype, LossScale, Plan, PrecisionConfig};

/// The element types of all parameters, in plan order.
#[derive(Clone, Debug)]
pub(crate) struct Dtypes {
    /// What the optimizer steps.
    pub(crate) master: Vec<Dtype>,
    /// What is gathered, and what the model computes with.
    pub(crate) compute: Vec<Dtype>,
    /// What gradients are sent in.
    pub(crate) reduce: Vec<Dtype>,
    /// By unit: what its output is cast to.
    pub(crate) output: Vec<Dtype>,
}

impl Dtypes {
    /// As the configuration says, and for single units their attributes. Parameters that are not float32 stay as they are.
    pub(crate) fn new(plan: &Plan, master: Vec<Dtype>, config: &PrecisionConfig) -> Self {
        let of = |chosen: &dyn Fn(usize) -> Dtype| {
            let chosen = |(param, &dtype): (usize, &Dtype)| if dtype == Dtype::F32 { chosen(param) } else { dtype };
            master.iter().enumerate().map(chosen).collect()
        };
        let overrides = |param: usize| &plan.units()[plan.params()[param].unit].overrides;
        let named = |name: &Option<String>, otherwise| name.as_deref().and_then(Dtype::named).unwrap_or(otherwise);
        let compute = of(&|param| named(&overrides(param).precision, config.parameters));
        let reduce = of(&|param| named(&overrides(param).reduce, config.reduce));
        let output = plan.units().iter().map(|unit| named(&unit.overrides.output, config.output)).collect();
        Self { master, compute, reduce, output }
    }

    /// How the loss is scaled: as the configuration says, and if it says nothing, dynamically where anything is f16.
    pub(crate) fn loss_scale(&self, config: &PrecisionConfig) -> Option<LossScale> {
        let is_half = self.compute.contains(&Dtype::F16) || self.reduce.contains(&Dtype::F16);
        config.resolved_loss_scale().or(is_half.then_some(LossScale::Dynamic))
    }
}

/// One line that says all of it.
pub(crate) struct Summary<'a> {
    pub(crate) dtypes: &'a Dtypes,
    pub(crate) config: &'a PrecisionConfig,
}

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = |dtypes: &[Dtype]| {
            let used: Vec<_> = Dtype::ALL.into_iter().filter(|dtype| dtypes.contains(dtype)).map(Dtype::name).collect();
            used.join(" and ")
        };
        let Dtypes { master, compute, reduce, output } = self.dtypes;
        let [master, compute, reduce, output] = [master, compute, reduce, output].map(|dtypes| names(dtypes));
        write!(f, "parameters and optimizer state in {master}, computed in {compute}, gradients sent in {reduce}")?;
        // For pages and terminals, in lines of less than a hundred columns.
        f.write_str(if f.alternate() { ",\n" } else { ", " })?;
        write!(f, "outputs cast to {output}, ")?;
        match self.dtypes.loss_scale(self.config) {
            None => f.write_str("no loss scale"),
            Some(LossScale::Dynamic) => f.write_str("a dynamic loss scale"),
            Some(LossScale::Fixed(scale)) => write!(f, "a loss scale of {scale}"),
        }
    }
}
