//! The parts in which the first unit of a model travels.
//!
//! [Note: The first unit travels in parts]
//! Between two steps nothing computes beside the communication of what forward uses first: its gradients are the last to
//! come, then they are reduced, the optimizer steps, the new blocks are gathered, and the next forward waits for them. So a
//! large first unit is divided into parts, each a unit of its own: while one part is computed, stepped or gathered, another
//! is reduced, and the next forward waits for the first part alone. All parts are gathered together, each as a message of
//! its own, whichever of them is asked for: so the ranks' gathers meet where one leaves out a part, and a model which goes
//! back and forth between parts gathers nothing twice.
//!
//! That costs a few messages more in each step, which is why only one unit is divided, and only a large one.

use std::ops::Range;

use crate::Plan;
use crate::plan::Unit;

/// A first unit is divided from this size on, in bytes of float32: from there three messages more cost less than waiting for
/// all of it, also where a link moves 100 GB/s.
const LARGE_UNIT_BYTES: usize = 4 << 20;

/// Parts are about this fraction of the unit. A parameter is not cut for it.
const NUM_PARTS: usize = 4;

impl Plan {
    /// Divides the first unit that is gathered on use, large enough, and not a single parameter.
    pub(crate) fn divide_first_unit(&mut self) {
        let parts = |unit: usize| {
            let is_gathered = self.unit_params(unit).any(|param| !self.is_resident(param));
            let lens: Vec<usize> = self.unit_params(unit).map(|param| param.layout.full_len()).collect();
            (is_gathered && !self.units[unit].keep).then(|| parts(&lens)).flatten()
        };
        let Some((first, parts)) = (0..self.units.len()).find_map(|unit| parts(unit).map(|parts| (unit, parts))) else {
            return;
        };
        let (whole, num_parts) = (self.units[first].clone(), parts.len());
        let part = |(index, range): (usize, Range<usize>)| Unit {
            name: name(&whole.name, index, num_parts),
            params: whole.params[range].to_vec(),
            follows: index > 0,
            ..whole.clone()
        };
        self.units.splice(first..=first, parts.into_iter().enumerate().map(part));
        for (index, unit) in self.units.iter().enumerate() {
            for &param in &unit.params {
                self.params[param].unit = index;
            }
        }
    }
}

/// What a part is called.
pub(crate) fn name(whole: &str, index: usize, num_parts: usize) -> String {
    format!("{whole} part {} of {num_parts}", index + 1)
}

/// The parts of a unit whose parameters have so many elements; `None` if it stays whole. They are consecutive parameters, in
/// parts of like size. Small parameters stay with the large one before them, as a bias with its weight.
pub(crate) fn parts(lens: &[usize]) -> Option<Vec<Range<usize>>> {
    let len = lens.iter().sum::<usize>();
    if len < LARGE_UNIT_BYTES / 4 {
        return None;
    }
    let target = len / NUM_PARTS;
    let mut parts = Vec::new();
    let (mut start, mut part_len) = (0, 0);
    for (index, &len) in lens.iter().enumerate() {
        let is_large = len > target / 8;
        let is_full = part_len > target / 2 && part_len + len > target + target / 4;
        if is_large && is_full {
            parts.push(start..index);
            (start, part_len) = (index, 0);
        }
        part_len += len;
    }
    parts.push(start..lens.len());
    (parts.len() > 1).then_some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FieldRule, Mesh, ModelShape, ParamSpec, Stage, WrapPolicy};

    /// A transformer with the sizes of its matrices in `width`s.
    fn plan(width: usize, stage: Stage, num_shards: usize) -> Plan {
        let matrix = |path: &str, columns: usize| (path.to_owned(), vec![width, columns * width]);
        let mut list = vec![matrix("tokens.weight", 4)];
        for block in 0..2 {
            let matrix = |name: &str, columns| matrix(&format!("blocks.{block}.{name}"), columns);
            let bias = |name: &str| (format!("blocks.{block}.{name}"), vec![width]);
            list.extend([bias("norm"), matrix("query", 1), bias("query_bias"), matrix("key", 1), matrix("value", 1)]);
            list.extend([matrix("project", 1), bias("project_bias"), matrix("up", 4), bias("up_bias")]);
            list.extend([matrix("down", 4), bias("down_bias")]);
        }
        let param = |(path, shape): (String, Vec<usize>)| ParamSpec {
            path: path.split('.').map(str::to_owned).collect(),
            shape,
            trainable: true,
            ..ParamSpec::default()
        };
        let list: Vec<_> = list.into_iter().map(param).collect();
        let policy = WrapPolicy::new().field("tokens", FieldRule::unit()).field("blocks", FieldRule::units());
        Plan::new(&policy, &list, &Mesh::one_dim(num_shards), stage).unwrap()
    }

    fn names(plan: &Plan) -> Vec<&str> {
        plan.units().iter().map(|unit| unit.name.as_str()).collect()
    }

    #[test]
    fn the_first_large_unit_of_several_parameters_is_divided_and_no_other() {
        let plan = plan(512, Stage::Parameters, 2);
        let expected = ["tokens", "blocks.0 part 1 of 3", "blocks.0 part 2 of 3", "blocks.0 part 3 of 3", "blocks.1"];
        assert_eq!(names(&plan), expected);
        let follows: Vec<bool> = plan.units().iter().map(|unit| unit.follows).collect();
        assert_eq!(follows, [false, false, true, true, false]);
        let last = |unit: usize| plan.params()[*plan.units()[unit].params.last().unwrap()].path.clone();
        assert_eq!([1, 2, 3].map(last), ["blocks.0.value", "blocks.0.up_bias", "blocks.0.down_bias"]);
        for (index, param) in plan.params().iter().enumerate() {
            assert!(plan.units()[param.unit].params.contains(&index), "{}", param.path);
        }
        assert_eq!(plan.largest_unit_len(false), 12 * 512 * 512 + 5 * 512, "parts count together");
    }

    #[test]
    fn sizes_alone_are_divided_as_the_plan_is() {
        for width in [128, 512] {
            let whole = ModelShape::of(&plan(width, Stage::Gradients, 2));
            let divided = ModelShape::of(&plan(width, Stage::Parameters, 2));
            assert_eq!(whole.in_parts(), divided, "{width}");
            assert_eq!(divided.clone().in_parts(), divided, "once");
        }
        let mut whole = ModelShape::of(&plan(512, Stage::Gradients, 2));
        whole.units[1].flops_per_token = Some(1_000_003);
        let parts = whole.in_parts().units.into_iter().skip(1).take(3);
        let flops: Vec<u64> = parts.map(|part| part.flops_per_token.unwrap()).collect();
        assert_eq!(flops.iter().sum::<u64>(), 1_000_003, "{flops:?}");
    }

    #[test]
    fn what_is_small_or_never_gathered_stays_whole() {
        assert_eq!(names(&plan(128, Stage::Parameters, 2)), ["tokens", "blocks.0", "blocks.1"]);
        assert_eq!(names(&plan(512, Stage::Parameters, 1)), ["tokens", "blocks.0", "blocks.1"]);
        assert_eq!(names(&plan(512, Stage::Gradients, 2)), ["tokens", "blocks.0", "blocks.1"]);
    }
}
