//! A model as sizes: which parameters form which unit, without tensors. What a planner needs, and a file can hold.

use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{Plan, ShardLayout, UnitTraffic, parts};

/// What a shape file calls itself.
const FORMAT: &str = "fsdp-shape-1";

/// The most elements that a model is planned for: beyond that not every whole number is a float.
pub const MOST_ELEMENTS: u64 = 1 << 53;

/// The units of a model with the shapes of their parameters, in the order in which forward uses them.
///
/// ```
/// use fsdp_core::{FieldRule, Mesh, ModelShape, ParamSpec, Plan, Stage, WrapPolicy};
///
/// let weight = ParamSpec { path: vec!["up".into(), "weight".into()], shape: vec![6, 4], trainable: true, ..Default::default() };
/// let policy = WrapPolicy::new().field("up", FieldRule::unit());
/// let plan = Plan::new(&policy, &[weight], &Mesh::one_dim(4), Stage::Parameters)?;
///
/// // A derived model gives its plan: `ModelShape::of(model.plan()).write(path)` makes the file for `fsdp plan --shape`.
/// let shape = ModelShape::of(&plan);
/// assert_eq!((shape.units[0].name.as_str(), shape.parameter_len()), ("up", 24));
/// assert_eq!(ModelShape::from_json(&shape.to_json(), "printed")?, shape);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelShape {
    format: String,
    /// The units.
    pub units: Vec<UnitShape>,
}

/// One unit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnitShape {
    /// Its name.
    pub name: String,
    /// Stays gathered between forward and backward.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keep: bool,
    /// Units gathered ahead of this one in forward, if other than the configuration says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefetch: Option<usize>,
    /// It is a part of the unit before it: they are gathered ahead and freed together.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub follows: bool,
    /// Floating-point operations of its forward for one token. `None`: two for each parameter. 0 for a table of which
    /// forward only takes rows: backward does not gather it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flops_per_token: Option<u64>,
    /// Its parameters.
    pub parameters: Vec<ParamShape>,
}

/// One parameter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParamShape {
    /// Path components joined with dots.
    pub path: String,
    /// Logical shape, in elements.
    pub shape: Vec<usize>,
    /// The dimension that is cut.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub dim: usize,
    /// Not cut: whole on every rank.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub replicate: bool,
    /// Receives no gradients.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub frozen: bool,
}

fn is_zero(number: &usize) -> bool {
    *number == 0
}

impl ModelShape {
    /// A model of these units.
    pub fn new(units: Vec<UnitShape>) -> Self {
        Self { format: FORMAT.to_owned(), units }
    }

    /// The units of a plan. Stage and mesh of the plan do not matter.
    pub fn of(plan: &Plan) -> Self {
        let unit = |index: usize| UnitShape {
            name: plan.units()[index].name.clone(),
            keep: plan.units()[index].keep,
            prefetch: plan.units()[index].overrides.prefetch,
            follows: plan.units()[index].follows,
            flops_per_token: None,
            parameters: plan
                .unit_params(index)
                .map(|param| ParamShape {
                    path: param.path.clone(),
                    shape: param.layout.shape().to_vec(),
                    dim: param.layout.dim(),
                    replicate: param.uncut,
                    frozen: !param.trainable,
                })
                .collect(),
        };
        Self::new((0..plan.units().len()).map(unit).collect())
    }

    /// `parameter_len` parameters in `num_units` units of equal size, as far as they divide.
    ///
    /// # Panics
    /// If `num_units` is 0.
    pub fn even(parameter_len: usize, num_units: usize) -> Self {
        assert!(num_units > 0, "a model has at least one unit");
        let unit = |index: usize| {
            let len =
                (index + 1) * (parameter_len / num_units) + ((index + 1) * (parameter_len % num_units)) / num_units;
            let before = index * (parameter_len / num_units) + (index * (parameter_len % num_units)) / num_units;
            let name = format!("units.{index}");
            let path = format!("{name}.weight");
            let shape = vec![len - before];
            UnitShape::new(name, vec![ParamShape { path, shape, dim: 0, replicate: false, frozen: false }])
        };
        Self::new((0..num_units).map(unit).collect())
    }

    /// Elements of all parameters.
    pub fn parameter_len(&self) -> u64 {
        self.units.iter().map(UnitShape::parameter_len).sum()
    }

    /// The same model with every `size` neighbouring units of equal shape in one unit.
    pub fn grouped(&self, size: usize) -> Self {
        let mut units: Vec<(UnitShape, usize)> = Vec::new();
        let mut last: Option<&UnitShape> = None;
        for unit in &self.units {
            let alike = last.is_some_and(|last| !unit.keep && !unit.follows && last.has_shapes_of(unit));
            match units.last_mut() {
                Some((group, num_units)) if alike && *num_units < size => {
                    if *num_units == 1 {
                        group.flops_per_token = Some(group.forward_flops_per_token());
                    }
                    group.flops_per_token = group.flops_per_token.map(|flops| flops + unit.forward_flops_per_token());
                    group.parameters.extend(unit.parameters.iter().cloned());
                    *num_units += 1;
                }
                _ => units.push((unit.clone(), 1)),
            }
            last = Some(unit);
        }
        Self::new(units.into_iter().map(|(unit, _)| unit).collect())
    }

    /// The model as a plan divides it at stage 3 on several ranks. One that is divided stays as it is.
    #[must_use]
    pub fn in_parts(mut self) -> Self {
        let divided = |unit: &UnitShape| {
            let is_gathered = unit.parameters.iter().any(|param| !param.replicate);
            let lens: Vec<usize> = unit.parameters.iter().map(|param| param.shape.iter().product()).collect();
            (is_gathered && !unit.keep).then(|| parts::parts(&lens)).flatten()
        };
        let is_whole = self.units.iter().all(|unit| !unit.follows);
        let mut found = self.units.iter().enumerate().filter(|_| is_whole);
        let Some((first, ranges)) = found.find_map(|(index, unit)| divided(unit).map(|ranges| (index, ranges))) else {
            return self;
        };
        let (whole, num_parts) = (self.units[first].clone(), ranges.len());
        let len = |range: Range<usize>| UnitShape::new("", whole.parameters[range].to_vec()).parameter_len();
        // As much of the whole's work as a part has of its parameters.
        let flops_before = |end: usize, flops: u64| {
            (u128::from(flops) * u128::from(len(0..end)) / u128::from(whole.parameter_len().max(1))) as u64
        };
        let part = |(index, range): (usize, Range<usize>)| UnitShape {
            name: parts::name(&whole.name, index, num_parts),
            follows: index > 0,
            flops_per_token: whole
                .flops_per_token
                .map(|flops| flops_before(range.end, flops) - flops_before(range.start, flops)),
            parameters: whole.parameters[range].to_vec(),
            ..whole.clone()
        };
        let parts: Vec<_> = ranges.into_iter().enumerate().map(part).collect();
        self.units.splice(first..=first, parts);
        self
    }

    /// The file's text.
    pub fn to_json(&self) -> String {
        // Strings, numbers and lists of them always have a JSON form.
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    /// Reads a file's text; `origin` is its name in errors.
    ///
    /// # Errors
    /// If it is no shape file, has no parameters, or cuts a dimension that does not exist.
    pub fn from_json(text: &str, origin: &str) -> Result<Self, ShapeError> {
        let origin = || origin.to_owned();
        let shape: Self = serde_json::from_str(text)
            .map_err(|error| ShapeError::Syntax { origin: origin(), message: error.to_string() })?;
        if shape.format != FORMAT {
            return Err(ShapeError::Format { origin: origin(), got: shape.format });
        }
        let mut all = 0u64;
        for param in shape.units.iter().flat_map(|unit| &unit.parameters) {
            let (parameter, shape) = (param.path.clone(), param.shape.clone());
            if param.dim >= param.shape.len().max(1) {
                return Err(ShapeError::Dimension { origin: origin(), parameter, dim: param.dim, shape });
            }
            let len = param.shape.iter().try_fold(1usize, |len, &size| len.checked_mul(size));
            all = len.map_or(u64::MAX, |len| all.saturating_add(len as u64));
            if all > MOST_ELEMENTS {
                return Err(ShapeError::TooLarge { origin: origin(), parameter, shape });
            }
        }
        let flops = |unit: &UnitShape| unit.flops_per_token.unwrap_or(0);
        if let Some(unit) = shape.units.iter().find(|unit| flops(unit) > 2 * MOST_ELEMENTS) {
            let (unit, flops) = (unit.name.clone(), flops(unit));
            return Err(ShapeError::Operations { origin: origin(), unit, flops });
        }
        if shape.parameter_len() == 0 {
            return Err(ShapeError::Empty { origin: origin() });
        }
        Ok(shape)
    }

    /// Reads a file.
    ///
    /// # Errors
    /// If it cannot be read, or as [`ModelShape::from_json`].
    pub fn read(file: &Path) -> Result<Self, ShapeError> {
        let text = fs::read_to_string(file).map_err(|source| ShapeError::Io { file: file.to_owned(), source })?;
        Self::from_json(&text, &file.display().to_string())
    }

    /// Writes the file, over one that is there.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(&self, file: &Path) -> Result<(), ShapeError> {
        fs::write(file, self.to_json()).map_err(|source| ShapeError::Io { file: file.to_owned(), source })
    }
}

impl UnitShape {
    /// A unit that is freed after use and does what its parameters suggest.
    pub fn new(name: impl Into<String>, parameters: Vec<ParamShape>) -> Self {
        Self { name: name.into(), keep: false, prefetch: None, follows: false, flops_per_token: None, parameters }
    }

    /// Elements of its parameters.
    pub fn parameter_len(&self) -> u64 {
        self.parameters.iter().map(|param| param.shape.iter().product::<usize>() as u64).sum()
    }

    /// Elements that receive gradients.
    pub fn trainable_len(&self) -> u64 {
        let trainable = self.parameters.iter().filter(|param| !param.frozen);
        trainable.map(|param| param.shape.iter().product::<usize>() as u64).sum()
    }

    /// Floating-point operations of its forward for one token: a multiplication and an addition with each parameter,
    /// unless the unit says otherwise.
    pub fn forward_flops_per_token(&self) -> u64 {
        self.flops_per_token.unwrap_or(2 * self.parameter_len())
    }

    /// The layouts of its parameters that are cut into `num_shards`, and of those that are not.
    pub fn layouts(&self, num_shards: usize) -> Vec<ShardLayout> {
        let shards = |param: &ParamShape| if param.replicate { (0, 1) } else { (param.dim, num_shards) };
        let layout = |param: &ParamShape| {
            let (dim, num_shards) = shards(param);
            ShardLayout::new(&param.shape, dim, num_shards)
        };
        self.parameters.iter().map(layout).collect()
    }

    /// What it sends, cut into `num_shards`, without the parameters that are whole on every rank.
    pub fn traffic(&self, num_shards: usize) -> UnitTraffic {
        let layouts = self.layouts(num_shards);
        let cut = layouts.iter().zip(&self.parameters).filter(|(_, param)| !param.replicate);
        let traffic = UnitTraffic::from_layouts(cut.map(|(layout, _)| layout));
        if self.keep { traffic.keep() } else { traffic }
    }

    fn has_shapes_of(&self, other: &Self) -> bool {
        let alike = |(one, two): (&ParamShape, &ParamShape)| {
            (&one.shape, one.dim, one.replicate, one.frozen) == (&two.shape, two.dim, two.replicate, two.frozen)
        };
        (self.keep, self.prefetch) == (other.keep, other.prefetch)
            && self.parameters.len() == other.parameters.len()
            && self.parameters.iter().zip(&other.parameters).all(alike)
    }
}

/// Why a file is no model.
#[derive(Debug, thiserror::Error)]
pub enum ShapeError {
    /// The file cannot be read or written.
    #[error("{}: {source}; a shape file is written by `ModelShape::of(model.plan()).write(path)`", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Not the JSON of a shape.
    #[error("{origin}: not a shape file: {message}; write one with `ModelShape::of(model.plan()).write(path)`")]
    Syntax {
        /// The file.
        origin: String,
        /// What the parser said.
        message: String,
    },
    /// Another format.
    #[error("{origin}: its format is \"{got}\", and \"{FORMAT}\" is read here; write the file anew with this version")]
    Format {
        /// The file.
        origin: String,
        /// The format that it has.
        got: String,
    },
    /// A cut along a dimension that is not there.
    #[error(
        "{origin}: `{parameter}` is cut along dimension {dim}, but its shape is {shape:?}; dimensions count from 0"
    )]
    Dimension {
        /// The file.
        origin: String,
        /// The parameter.
        parameter: String,
        /// The dimension.
        dim: usize,
        /// The parameter's shape.
        shape: Vec<usize>,
    },
    /// More elements than can be counted.
    #[error(
        "{origin}: `{parameter}` of shape {shape:?} makes the model larger than the {MOST_ELEMENTS} elements that can be counted; correct \
         its shape"
    )]
    TooLarge {
        /// The file.
        origin: String,
        /// The parameter.
        parameter: String,
        /// The parameter's shape.
        shape: Vec<usize>,
    },
    /// More operations than can be counted.
    #[error(
        "{origin}: unit `{unit}` has {flops} operations for a token, more than can be counted; correct `flops_per_token`"
    )]
    Operations {
        /// The file.
        origin: String,
        /// The unit.
        unit: String,
        /// What it says.
        flops: u64,
    },
    /// Nothing to plan.
    #[error("{origin}: the model has no parameters; list at least one unit with a parameter")]
    Empty {
        /// The file.
        origin: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FieldRule, Mesh, ParamSpec, Stage, WrapPolicy};

    fn param(path: &str, shape: &[usize], trainable: bool) -> ParamSpec {
        let path = path.split('.').map(str::to_owned).collect();
        ParamSpec { path, shape: shape.to_vec(), trainable, ..ParamSpec::default() }
    }

    #[test]
    fn the_shape_of_a_plan_is_the_same_at_every_stage_and_on_every_mesh() {
        let params = [
            param("blocks.0.weight", &[6, 4], true),
            param("blocks.1.weight", &[6, 4], true),
            param("gate", &[3], false),
            param("head.weight", &[4, 10], true),
        ];
        let policy = WrapPolicy::new()
            .field("blocks", FieldRule::units().prefetch(2))
            .field("gate", FieldRule::root().replicate())
            .field("head", FieldRule::unit().keep().spec([None, Some("shard")]));
        let shapes: Vec<_> = Stage::ALL
            .iter()
            .flat_map(|&stage| [1, 3].map(|ranks| Plan::new(&policy, &params, &Mesh::one_dim(ranks), stage).unwrap()))
            .map(|plan| ModelShape::of(&plan))
            .collect();
        assert!(shapes.iter().all(|shape| *shape == shapes[0]), "{shapes:#?}");
        let shape = &shapes[0];
        assert_eq!(shape.units.iter().map(|unit| unit.keep).collect::<Vec<_>>(), [false, false, true, true]);
        assert_eq!(shape.units[0].prefetch, Some(2));
        assert!(shape.units[2].parameters[0].replicate && shape.units[2].parameters[0].frozen);
        assert_eq!(shape.units[3].layouts(4)[0].shard_shape(0), [4, 3]);
        assert_eq!((shape.units[2].parameter_len(), shape.units[2].trainable_len()), (3, 0));
        assert_eq!(ModelShape::from_json(&shape.to_json(), "printed").unwrap(), *shape);
    }

    #[test]
    fn equal_units_add_up_to_the_whole() {
        for (len, num_units) in [(10, 3), (7_000_000_000, 32), (2, 5), (usize::MAX >> 8, 80)] {
            let shape = ModelShape::even(len, num_units);
            assert_eq!((shape.parameter_len(), shape.units.len()), (len as u64, num_units));
            let lens = shape.units.iter().map(UnitShape::parameter_len);
            assert!(lens.clone().max().unwrap() - lens.min().unwrap() <= 1);
        }
    }

    #[test]
    fn groups_hold_neighbours_of_equal_shape_and_keep_the_work() {
        let mut shape = ModelShape::even(70, 7);
        shape.units[6].keep = true;
        shape.units[2].flops_per_token = Some(100);
        let grouped = shape.grouped(4);
        let lens: Vec<_> = grouped.units.iter().map(UnitShape::parameter_len).collect();
        assert_eq!(lens, [40, 20, 10]);
        assert_eq!(grouped.units[0].forward_flops_per_token(), 3 * 20 + 100);
        assert_eq!(shape.grouped(1), shape);
        let total = |shape: &ModelShape| shape.units.iter().map(UnitShape::forward_flops_per_token).sum::<u64>();
        assert_eq!(total(&shape.grouped(3)), total(&shape));
    }

    #[test]
    fn a_broken_file_says_what_is_wrong_in_it() {
        let refusal = |text: &str| ModelShape::from_json(text, "gpt.json").unwrap_err().to_string();
        let shape = |parameter: &str| {
            format!(r#"{{"format": "fsdp-shape-1", "units": [{{"name": "a", "parameters": [{parameter}]}}]}}"#)
        };
        assert!(refusal("[]").starts_with("gpt.json: not a shape file: "), "{}", refusal("[]"));
        assert!(refusal(r#"{"format": "fsdp-shape-1", "units": [], "extra": 1}"#).contains("unknown field `extra`"));
        assert_eq!(
            refusal(r#"{"format": "other", "units": []}"#),
            "gpt.json: its format is \"other\", and \"fsdp-shape-1\" is read here; write the file anew with this version"
        );
        assert_eq!(
            refusal(&shape(r#"{"path": "w", "shape": [3], "dim": 1}"#)),
            "gpt.json: `w` is cut along dimension 1, but its shape is [3]; dimensions count from 0"
        );
        assert!(
            refusal(&shape(r#"{"path": "w", "shape": [9223372036854775807, 3]}"#))
                .contains("larger than the 9007199254740992 elements")
        );
        assert_eq!(
            refusal(r#"{"format": "fsdp-shape-1", "units": []}"#),
            "gpt.json: the model has no parameters; list at least one unit with a parameter"
        );
        let missing = ModelShape::read(Path::new("/no/such.json")).unwrap_err().to_string();
        assert!(missing.starts_with("/no/such.json: No such file"), "{missing}");
    }
}
