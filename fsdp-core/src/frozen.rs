//! What stays gathered between forward and backward because it is frozen.
//!
//! [Note: Frozen behind what is trained]
//! A trained parameter is gathered again in backward. A frozen one cannot be, since autodiff asks only tensors that it tracks
//! for their value again. So a layer whose input has a gradient, as it has behind anything that is trained, holds its frozen
//! weight in whole until backward is done with it. Nothing holds what comes before all that is trained; what has a LoRA
//! adapter that is trained, whose sum with its base is tracked; a table whose rows are only looked up, by numbers that have no
//! gradient; and what runs in `recompute`, which a plan cannot see.

use crate::plan::LARGE_HELD_BYTES;
use crate::{Plan, PlanWarning, UnitIndex};

impl Plan {
    /// Elements of a unit that autodiff holds, gathered, from forward to backward, because they are frozen and something in
    /// front of them is trained. The model's order of fields stands for that of its forward.
    ///
    /// ```
    /// use fsdp_core::{FieldRule, Mesh, ParamSpec, Plan, Stage, WrapPolicy};
    ///
    /// let param = |path: &str, trainable: bool| ParamSpec {
    ///     path: path.split('.').map(str::to_owned).collect(),
    ///     shape: vec![4, 4],
    ///     trainable,
    ///     ..ParamSpec::default()
    /// };
    /// let params = [param("blocks.0.w", false), param("blocks.1.w", true), param("blocks.2.w", false)];
    /// let policy = WrapPolicy::new().field("blocks", FieldRule::units());
    /// let plan = Plan::new(&policy, &params, &Mesh::one_dim(2), Stage::Parameters)?;
    /// assert_eq!([0, 1, 2].map(|unit| plan.held_frozen_len(unit)), [0, 0, 16]);
    /// # Ok::<(), fsdp_core::PlanError>(())
    /// ```
    pub fn held_frozen_len(&self, unit: UnitIndex) -> usize {
        let first_trained = self.params.iter().position(|param| param.trainable).unwrap_or(self.params.len());
        let is_held = |param: usize| {
            let spec = &self.params[param];
            let is_frozen = !spec.trainable && !spec.looked_up && param > first_trained;
            is_frozen && !self.is_resident(spec) && !self.is_held(spec) && !self.has_trained_adapter(param)
        };
        let Some(unit) = self.units.get(unit).filter(|unit| !unit.keep) else { return 0 };
        let held = unit.params.iter().filter(|&&param| is_held(param));
        held.map(|&param| self.params[param].layout.full_len()).sum()
    }

    /// An adapter's factors come right after its base.
    fn has_trained_adapter(&self, base: usize) -> bool {
        let of_base = format!("{}.", self.params[base].path);
        let mut factors = self.params[base + 1..].iter().take_while(|param| param.path.starts_with(&of_base));
        self.params[base].adapted && factors.any(|factor| factor.trainable)
    }

    /// Warns anew: of what is frozen now.
    pub(crate) fn warn_of_held_frozen(&mut self) {
        self.warnings.retain(|warning| !matches!(warning, PlanWarning::HeldFrozen { .. }));
        let held = |unit: UnitIndex| 4 * self.held_frozen_len(unit) as u64;
        let units: Vec<_> = (0..self.units.len()).filter(|&unit| held(unit) > 0).collect();
        let bytes = units.iter().map(|&unit| held(unit)).sum();
        if bytes >= LARGE_HELD_BYTES {
            let units = units.into_iter().map(|unit| self.units[unit].name.clone()).collect();
            self.warnings.push(PlanWarning::HeldFrozen { units, bytes });
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{FieldRule, Mesh, ParamSpec, Plan, PlanWarning, Stage, WrapPolicy};

    fn param(path: &str, width: usize, trainable: bool) -> ParamSpec {
        let path = path.split('.').map(str::to_owned).collect();
        ParamSpec { path, shape: vec![width, 256], trainable, ..ParamSpec::default() }
    }

    fn plan(rule: FieldRule, stage: Stage, params: &[ParamSpec]) -> Plan {
        let policy = WrapPolicy::new().field("blocks", rule);
        Plan::new(&policy, params, &Mesh::one_dim(2), stage).unwrap()
    }

    #[test]
    fn what_is_frozen_behind_something_trained_is_in_the_table_and_warned_of_where_it_is_large() {
        let params = |width| {
            let bias = ParamSpec { shape: vec![8], ..param("blocks.1.b", 0, false) };
            let adapted = ParamSpec { adapted: true, ..param("blocks.3.w", width, false) };
            let blocks = [(0, false), (1, true), (2, false)];
            let blocks = blocks.map(|(block, trained)| param(&format!("blocks.{block}.w"), width, trained));
            let [first, second, third] = blocks;
            let factor = ParamSpec { shape: vec![8, 8], ..param("blocks.3.w.lora.a", 0, true) };
            [first, second, bias, third, adapted, factor]
        };
        let held = |plan: &Plan| (0..plan.units().len()).map(|unit| plan.held_frozen_len(unit)).collect::<Vec<_>>();
        let large = plan(FieldRule::units(), Stage::Parameters, &params(1024));
        assert_eq!(held(&large), [0, 0, 1024 * 256, 0]);
        let warning = PlanWarning::HeldFrozen { units: vec!["blocks.2".into()], bytes: 1 << 20 };
        assert_eq!(large.warnings(), std::slice::from_ref(&warning));
        for part in ["`blocks.2`", "1.0 MiB", "fsdp_burn::recompute"] {
            assert!(warning.to_string().contains(part), "{warning}");
        }
        let expected = "\
unit      parameters    logical    local
blocks.0           1    262,144  131,072  frozen
blocks.1           2    262,152  131,076
blocks.2           1    262,144  131,072  frozen, held until backward
blocks.3           2    262,208  131,104
total              6  1,048,648  524,324  elements
";
        assert_eq!(large.table(0), expected);
        let thawed = large.with_trainable(|_| true);
        assert_eq!((held(&thawed), thawed.warnings()), (vec![0; 4], &[][..]));
        let frozen_again = thawed.with_trainable(|param| [1, 5].contains(&param));
        assert_eq!((held(&frozen_again), frozen_again.warnings()), (held(&large), large.warnings()));
        // Without a trained factor, the sum of base and adapter is tracked by nothing.
        let without_factor = large.with_trainable(|param| param == 1);
        assert_eq!(held(&without_factor), [0, 0, 1024 * 256, 1024 * 256 + 64]);
        for other in [
            plan(FieldRule::units(), Stage::Parameters, &params(1023)),
            plan(FieldRule::units().keep(), Stage::Parameters, &params(1024)),
            plan(FieldRule::units(), Stage::Gradients, &params(1024)),
        ] {
            assert_eq!(other.warnings(), []);
        }
    }

    #[test]
    fn a_frozen_table_whose_rows_are_looked_up_is_not_held() {
        let table = |looked_up| ParamSpec { looked_up, ..param("blocks.1.w", 1024, false) };
        let held = |looked_up| {
            let params = [param("blocks.0.w", 8, true), table(looked_up)];
            plan(FieldRule::units(), Stage::Parameters, &params).held_frozen_len(1)
        };
        assert_eq!((held(false), held(true)), (1024 * 256, 0));
    }

    #[test]
    fn a_warning_of_many_units_names_the_first_and_counts_the_others() {
        let warning = PlanWarning::HeldFrozen { units: ["a", "b", "c"].map(str::to_owned).to_vec(), bytes: 3 << 20 };
        let text = warning.to_string();
        assert!(text.starts_with("unit `a` and 2 more are frozen"), "{text}");
    }
}
