//! Which parameter belongs to which unit and how it is cut: the wrap policy applied to one model. Printable.

use std::fmt;

use crate::policy::{is_index, matches};
use crate::{
    Dtype, FieldRule, Mesh, PartitionSpec, PrefetchDepth, Role, ShardLayout, SpecError, Stage, UnitIndex, UnitOverrides,
};
use crate::{Table, UnitTraits, WrapPolicy, grouped};

/// Name of the unit of all parameters that no rule puts elsewhere.
pub const ROOT_UNIT: &str = "root";

/// One parameter of a model, as data.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ParamSpec {
    /// Path components from the model down, `["blocks", "3", "up", "weight"]`.
    pub path: Vec<String>,
    /// Logical shape, in elements.
    pub shape: Vec<usize>,
    /// Receives gradients. A frozen parameter does not.
    pub trainable: bool,
    /// The op that uses the parameter holds it from forward to backward, as Burn's embedding does with its table.
    pub held_by_op: bool,
    /// The layer looks at the shape that the model stores, as Burn's batch norm and RMS norm do: where parameters are cut,
    /// this one stays whole on every rank.
    pub shape_is_read: bool,
    /// It has a LoRA adapter, whose factors have paths that begin with this one's. Where one of them is trained, it is gathered
    /// again in backward though it is frozen.
    pub adapted: bool,
    /// A table from which rows are taken by their numbers, as an embedding does: nothing is computed with it that has a
    /// gradient for anything else.
    pub looked_up: bool,
    /// Further places where the model uses the same parameter: tied weights. Paths as in `path`.
    pub also: Vec<Vec<String>>,
}

/// A parameter with its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedParam {
    /// Path components joined with dots.
    pub path: String,
    /// The unit it is gathered and reduced with.
    pub unit: UnitIndex,
    /// Receives gradients.
    pub trainable: bool,
    /// As [`ParamSpec::adapted`].
    pub adapted: bool,
    /// As [`ParamSpec::looked_up`].
    pub looked_up: bool,
    /// How the parameter is cut over the shard axis.
    pub layout: ShardLayout,
    /// Every rank holds and steps the whole parameter: stage 0, `#[shard(replicate)]`, or [`ParamSpec::shape_is_read`].
    pub replicated: bool,
    /// The rules say that it is not cut, at any stage: `#[shard(replicate)]`.
    pub uncut: bool,
    /// Further paths of the same parameter, which is tied. It is counted, sent and stepped once, under `path`.
    pub also: Vec<String>,
}

impl PlannedParam {
    /// How the parameter is cut among the ranks: into one block, which all of them hold, where it is replicated.
    pub fn stored_layout(&self) -> ShardLayout {
        match self.replicated {
            true => ShardLayout::new(self.layout.shape(), 0, 1),
            false => self.layout.clone(),
        }
    }

    /// Whether an optimizer sees only a block of this parameter.
    pub fn is_split(&self) -> bool {
        !self.replicated && self.layout.num_shards() > 1
    }
}

/// Parameters that are gathered, reduced and stepped together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Path of the field, or [`ROOT_UNIT`].
    pub name: String,
    /// Indices into [`Plan::params`], in the order of the model.
    pub params: Vec<usize>,
    /// Stays gathered between forward and backward.
    pub keep: bool,
    /// Settings that win over the configuration.
    pub overrides: UnitOverrides,
    /// It is a part of the unit before it. See [Note: The first unit travels in parts].
    pub follows: bool,
}

/// Something in the plan that is legal and probably not meant.
#[derive(Clone, Debug, PartialEq)]
pub enum PlanWarning {
    /// No rule names a unit: the whole model is one unit.
    NoUnits,
    /// A rule whose path matches no parameter.
    RuleMatchesNothing {
        /// The rule's path.
        path: String,
    },
    /// One unit holds more than half of all parameters.
    LargeUnit {
        /// The unit.
        unit: String,
        /// Its share of all parameters, 0 to 1.
        share: f64,
    },
    /// A large table is gathered on use, and then held until backward by the op that uses it.
    HeldTable {
        /// The parameter.
        path: String,
        /// Its size, gathered, in float32.
        bytes: u64,
    },
    /// Frozen units are gathered in forward, and then held until backward, because something before them is trained.
    HeldFrozen {
        /// The units.
        units: Vec<String>,
        /// What is held of them together, in float32.
        bytes: u64,
    },
}

/// What is held until backward is worth a warning from this size on, in bytes.
pub(crate) const LARGE_HELD_BYTES: u64 = 1 << 20;

impl fmt::Display for PlanWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PlanWarning::NoUnits => f.write_str(
                "no field is a unit, so the whole model is gathered at once and stage 3 saves no memory while it runs; \
                 mark the repeated part of the model with #[shard(units)]",
            ),
            PlanWarning::RuleMatchesNothing { path } => {
                write!(
                    f,
                    "the rule for `{path}` matches no parameter (an empty Vec, None, or a field without parameters)"
                )
            }
            PlanWarning::LargeUnit { unit, share } => write!(
                f,
                "unit `{unit}` holds {:.0}% of all parameters, so gathering it needs most of the memory that sharding \
                 saves; mark its parts with #[shard(unit)] or #[shard(units)]",
                share * 100.0
            ),
            PlanWarning::HeldTable { path, bytes } => write!(
                f,
                "`{path}` is the table of a Burn `Embedding`, which holds it from forward to backward: gathered, \
                 {:.1} MiB in float32; use `fsdp_burn::nn::Embedding`, made from Burn's with `.into()`, which lets go of it",
                *bytes as f64 / f64::from(1 << 20)
            ),
            PlanWarning::HeldFrozen { units, bytes } => {
                let first = units.first().map_or("", String::as_str);
                match units.len() {
                    0 | 1 => write!(f, "unit `{first}` is")?,
                    len => write!(f, "unit `{first}` and {} more are", len - 1)?,
                }
                write!(
                    f,
                    " frozen behind something that is trained, so autodiff holds what is gathered from forward to \
                     backward: {:.1} MiB in float32; run it in `fsdp_burn::recompute`, which holds its input only",
                    *bytes as f64 / f64::from(1 << 20)
                )
            }
        }
    }
}

/// A model that cannot be planned.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// A partition spec does not fit its parameter.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// One parameter in two fields whose rules differ in what becomes of it.
    #[error(
        "`{parameter}` is the same parameter as `{first}` (tied weights), but it is {as_parameter} and the other is \
         {as_first}; give both fields the same `spec`, `replicate` or `ignore`"
    )]
    Tied {
        /// Path of the later field.
        parameter: String,
        /// Path of the first.
        first: String,
        /// What the rules make of the later one.
        as_parameter: String,
        /// What the rules make of the first.
        as_first: String,
    },
    /// The model has no parameters.
    #[error("the model has no parameters to shard (all are ignored, or it has none)")]
    NoParameters,
}

/// The units of a model on a mesh at a stage.
///
/// ```
/// use fsdp_core::{FieldRule, Mesh, ParamSpec, Plan, Stage, WrapPolicy};
///
/// let param = |path: &str, shape: &[usize]| ParamSpec {
///     path: path.split('.').map(str::to_owned).collect(),
///     shape: shape.to_vec(),
///     trainable: true,
///     ..ParamSpec::default()
/// };
/// let params = [param("blocks.0.weight", &[6, 4]), param("blocks.1.weight", &[6, 4]), param("norm.gamma", &[4])];
/// let policy = WrapPolicy::new().field("blocks", FieldRule::units());
/// let plan = Plan::new(&policy, &params, &Mesh::one_dim(4), Stage::Parameters)?;
///
/// let names: Vec<_> = plan.units().iter().map(|unit| unit.name.as_str()).collect();
/// assert_eq!(names, ["blocks.0", "blocks.1", "root"]);
/// println!("{}", plan.table(0));
/// # Ok::<(), fsdp_core::PlanError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    stage: Stage,
    mesh: Mesh,
    pub(crate) params: Vec<PlannedParam>,
    pub(crate) units: Vec<Unit>,
    ignored: Vec<String>,
    pub(crate) warnings: Vec<PlanWarning>,
}

impl Plan {
    /// Applies `policy` to `params`, which are given in the order in which the model is traversed.
    ///
    /// # Errors
    /// If a partition spec does not fit its parameter or mesh, or nothing is left to shard.
    pub fn new(policy: &WrapPolicy, params: &[ParamSpec], mesh: &Mesh, stage: Stage) -> Result<Self, PlanError> {
        let mut plan = Self {
            stage,
            mesh: mesh.clone(),
            params: Vec::new(),
            units: Vec::new(),
            ignored: Vec::new(),
            warnings: Vec::new(),
        };
        let mut matched = vec![false; policy.rules().len()];
        for param in params {
            plan.place(policy, param, &mut matched)?;
        }
        if plan.params.is_empty() {
            return Err(PlanError::NoParameters);
        }
        plan.warn(policy, &matched);
        plan.warn_of_held_frozen();
        plan.divide_first_unit();
        Ok(plan)
    }

    /// The stage that was planned for.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// The mesh that was planned for.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// All managed parameters, in the order of the model.
    pub fn params(&self) -> &[PlannedParam] {
        &self.params
    }

    /// All units, in the order of their first parameter.
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    /// Paths of the parameters that are left alone.
    pub fn ignored(&self) -> &[String] {
        &self.ignored
    }

    /// What is probably not meant.
    pub fn warnings(&self) -> &[PlanWarning] {
        &self.warnings
    }

    /// Logical elements of the managed parameters.
    pub fn num_params(&self) -> usize {
        self.params.iter().map(|param| param.layout.full_len()).sum()
    }

    /// The largest number of elements, logical, of those units that stay gathered or do not. Parts of a unit count together.
    pub fn largest_unit_len(&self, keep: bool) -> usize {
        let whole_len = |parts: &[Unit]| {
            let params = parts.iter().flat_map(|unit| &unit.params);
            params.map(|&param| self.params[param].layout.full_len()).sum()
        };
        let wholes = self.units.chunk_by(|_, unit| unit.follows);
        wholes.filter(|parts| parts[0].keep == keep).map(whole_len).max().unwrap_or(0)
    }

    /// Elements of a unit, logical.
    pub fn unit_len(&self, unit: UnitIndex) -> usize {
        self.unit_params(unit).map(|param| param.layout.full_len()).sum()
    }

    /// The parameters of a unit.
    pub fn unit_params(&self, unit: UnitIndex) -> impl Iterator<Item = &PlannedParam> {
        self.units[unit].params.iter().map(|&param| &self.params[param])
    }

    /// Elements of a parameter that a rank at `shard_index` of the shard axis holds between steps.
    pub fn local_len(&self, param: &PlannedParam, shard_index: usize) -> usize {
        if self.is_resident(param) { param.layout.full_len() } else { param.layout.shard_len(shard_index) }
    }

    /// Whether every rank holds the whole parameter all the time.
    pub fn is_resident(&self, param: &PlannedParam) -> bool {
        !self.stage.shards_parameters() || !param.is_split()
    }

    /// Whether autodiff holds the gathered parameter from forward to backward: vectors, such as biases and the scales of
    /// norms, which are small beside the matrices of their unit.
    pub fn is_held(&self, param: &PlannedParam) -> bool {
        param.layout.shape().len() <= 1
    }

    /// Bytes of the gathered copy of a unit, with the element types of all parameters in plan order. What every rank holds
    /// in whole is not gathered.
    pub fn gathered_bytes(&self, unit: UnitIndex, dtypes: &[Dtype]) -> usize {
        let cut = self.units[unit].params.iter().filter(|&&param| !self.is_resident(&self.params[param]));
        cut.map(|&param| self.params[param].layout.full_len() * dtypes[param].size_bytes()).sum()
    }

    /// The same plan where other parameters are trained: `trainable` is told each parameter by its index.
    pub fn with_trainable(&self, trainable: impl Fn(usize) -> bool) -> Self {
        let mut plan = self.clone();
        plan.params.iter_mut().enumerate().for_each(|(index, param)| param.trainable = trainable(index));
        plan.warn_of_held_frozen();
        plan
    }

    /// What the schedule must know of each unit, with the element types in which parameters are computed, and gradients reduced,
    /// of all parameters in plan order.
    pub fn unit_traits(&self, compute: &[Dtype], reduce: &[Dtype]) -> Vec<UnitTraits> {
        let gradient_bytes = |index: UnitIndex, dtypes: &[Dtype]| {
            let trained = self.units[index].params.iter().filter(|&&param| self.params[param].trainable);
            trained.map(|&param| self.params[param].layout.full_len() * dtypes[param].size_bytes()).sum()
        };
        let traits = |index: UnitIndex| UnitTraits {
            gathered_on_use: self.unit_params(index).any(|param| !self.is_resident(param)),
            keep: self.units[index].keep,
            trainable: self.unit_params(index).any(|param| param.trainable),
            prefetch: self.units[index].overrides.prefetch,
            gathered_bytes: self.gathered_bytes(index, compute),
            gradient_bytes: gradient_bytes(index, compute),
            sent_bytes: gradient_bytes(index, reduce),
            follows: self.units[index].follows,
        };
        (0..self.units.len()).map(traits).collect()
    }

    /// The unit table as text, with local sizes of the rank at `shard_index` of the shard axis.
    pub fn table(&self, shard_index: usize) -> String {
        let mut table = Table::new(["unit", "parameters", "logical", "local", ""]).with_notes();
        for (index, unit) in self.units.iter().enumerate() {
            let local: usize = self.unit_params(index).map(|param| self.local_len(param, shard_index)).sum();
            let replicated = self.unit_params(index).all(|param| param.replicated);
            let notes = [
                (unit.keep && self.stage.shards_parameters(), "stays gathered"),
                (replicated && self.stage != Stage::Ddp, "replicated"),
                (self.unit_params(index).all(|param| !param.trainable), "frozen"),
                (self.held_frozen_len(index) > 0, "held until backward"),
            ];
            let mut notes: Vec<_> =
                notes.into_iter().filter(|(is_so, _)| *is_so).map(|(_, note)| note.into()).collect();
            notes.extend(
                self.unit_params(index).flat_map(|param| &param.also).map(|path| format!("also used as {path}")),
            );
            let counts = [unit.params.len(), self.unit_len(index), local].map(|count| grouped(count as u64));
            let [num_params, logical, local] = counts;
            table.row([unit.name.clone(), num_params, logical, local, notes.join(", ")]);
        }
        let local: usize = self.params.iter().map(|param| self.local_len(param, shard_index)).sum();
        let counts = [self.params.len(), self.num_params(), local].map(|count| grouped(count as u64));
        let [num_params, logical, local] = counts;
        table.row(["total".into(), num_params, logical, local, "elements".into()]);
        table.to_string()
    }

    fn place(&mut self, policy: &WrapPolicy, param: &ParamSpec, matched: &mut [bool]) -> Result<(), PlanError> {
        let path = param.path.join(".");
        let rules = rules_of(policy, &param.path, matched);
        let cut = self.cut(&rules, &path, &param.shape)?;
        let also: Vec<String> = param.also.iter().map(|other| other.join(".")).collect();
        for (other, other_path) in also.iter().zip(&param.also) {
            let other_cut = self.cut(&rules_of(policy, other_path, matched), other, &param.shape)?;
            if other_cut != cut {
                let (parameter, first) = (other.clone(), path);
                return Err(PlanError::Tied { parameter, first, as_parameter: told(&other_cut), as_first: told(&cut) });
            }
        }
        let Some((layout, uncut)) = cut else {
            self.ignored.extend([path].into_iter().chain(also));
            return Ok(());
        };
        let unit_rule = rules.iter().rev().find(|(_, rule)| matches!(rule.role, Role::Unit | Role::Units));
        let unit = match unit_rule {
            Some((pattern, rule)) => self.unit_of(unit_name(pattern, rule.role, &param.path), rule),
            // Root parameters are used all over the model, so the root unit stays gathered, as in FSDP2.
            None => self.unit_of(ROOT_UNIT.to_owned(), &FieldRule::root().keep()),
        };
        let stays_whole = param.shape_is_read && self.stage.shards_parameters();
        let replicated = self.stage == Stage::Ddp || uncut || stays_whole;
        self.units[unit].params.push(self.params.len());
        let planned = PlannedParam {
            path,
            unit,
            trainable: param.trainable,
            adapted: param.adapted,
            looked_up: param.looked_up,
            layout,
            replicated,
            uncut,
            also,
        };
        let bytes = 4 * planned.layout.full_len() as u64;
        if param.held_by_op && bytes >= LARGE_HELD_BYTES && !self.units[unit].keep && !self.is_resident(&planned) {
            self.warnings.push(PlanWarning::HeldTable { path: planned.path.clone(), bytes });
        }
        self.params.push(planned);
        Ok(())
    }

    /// How the rules cut a parameter, and whether they replicate it; `None` where it is ignored.
    fn cut(&self, rules: &Rules, path: &str, shape: &[usize]) -> Result<Option<(ShardLayout, bool)>, PlanError> {
        if rules.iter().any(|(_, rule)| rule.role == Role::Ignore) {
            return Ok(None);
        }
        let spec = match rules.iter().rev().find_map(|(_, rule)| rule.spec.as_ref()) {
            Some(axes) => PartitionSpec::parse(axes.iter().map(Option::as_deref)),
            None => PartitionSpec::default(),
        };
        let layout = spec.resolve(path, shape, &self.mesh)?;
        Ok(Some((layout, rules.iter().any(|(_, rule)| rule.replicate))))
    }

    fn unit_of(&mut self, name: String, rule: &FieldRule) -> UnitIndex {
        self.units.iter().position(|unit| unit.name == name).unwrap_or_else(|| {
            let overrides = rule.overrides.clone();
            let unit = Unit { name, params: Vec::new(), keep: rule.keep, overrides, follows: false };
            self.units.push(unit);
            self.units.len() - 1
        })
    }

    fn warn(&mut self, policy: &WrapPolicy, matched: &[bool]) {
        for ((path, _), _) in policy.rules().iter().zip(matched).filter(|(_, matched)| !**matched) {
            self.warnings.push(PlanWarning::RuleMatchesNothing { path: path.join(".") });
        }
        if self.units.iter().all(|unit| unit.name == ROOT_UNIT) {
            self.warnings.push(PlanWarning::NoUnits);
            return;
        }
        for index in 0..self.units.len() {
            let share = self.unit_len(index) as f64 / self.num_params().max(1) as f64;
            if share > 0.5 {
                self.warnings.push(PlanWarning::LargeUnit { unit: self.units[index].name.clone(), share });
            }
        }
    }
}

/// The configured depths and limit as the schedule takes them.
impl From<&crate::PrefetchConfig> for PrefetchDepth {
    fn from(config: &crate::PrefetchConfig) -> Self {
        Self { forward: config.forward, backward: config.backward, max_bytes: config.max_bytes }
    }
}

/// The rules that match one parameter, with their paths: the longest, which is the innermost and wins, is the last.
type Rules<'a> = Vec<(&'a Vec<String>, &'a FieldRule)>;

fn rules_of<'a>(policy: &'a WrapPolicy, path: &[String], matched: &mut [bool]) -> Rules<'a> {
    let mut rules = Rules::new();
    for (index, (pattern, rule)) in policy.rules().iter().enumerate() {
        if matches(pattern, path) {
            matched[index] = true;
            rules.push((pattern, rule));
        }
    }
    rules.sort_by_key(|(pattern, _)| pattern.len());
    rules
}

/// In words, what the rules make of a parameter.
fn told(cut: &Option<(ShardLayout, bool)>) -> String {
    match cut {
        None => "ignored".into(),
        Some((_, true)) => "replicated".into(),
        Some((layout, false)) => format!("cut along dimension {}", layout.dim()),
    }
}

fn unit_name(pattern: &[String], role: Role, path: &[String]) -> String {
    let element = path.get(pattern.len()).filter(|part| role == Role::Units && is_index(part));
    path[..pattern.len() + usize::from(element.is_some())].join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(list: &[(&str, &[usize])]) -> Vec<ParamSpec> {
        let param = |(path, shape): &(&str, &[usize])| ParamSpec {
            path: path.split('.').map(str::to_owned).collect(),
            shape: shape.to_vec(),
            trainable: true,
            ..ParamSpec::default()
        };
        list.iter().map(param).collect()
    }

    fn unit_names(policy: &WrapPolicy, list: &[(&str, &[usize])]) -> Vec<String> {
        let plan = Plan::new(policy, &params(list), &Mesh::one_dim(2), Stage::Parameters).unwrap();
        plan.params().iter().map(|param| plan.units()[param.unit].name.clone()).collect()
    }

    #[test]
    fn each_element_is_a_unit_and_an_option_is_one() {
        let policy = WrapPolicy::new().field("blocks", FieldRule::units()).field("extra", FieldRule::units());
        let names =
            unit_names(&policy, &[("blocks.0.w", &[2]), ("blocks.10.w", &[2]), ("extra.w", &[2]), ("norm.w", &[2])]);
        assert_eq!(names, ["blocks.0", "blocks.10", "extra", "root"]);
    }

    #[test]
    fn an_inner_rule_wins_over_the_rule_around_it() {
        let block = WrapPolicy::new().field("experts", FieldRule::units());
        let policy =
            WrapPolicy::new().field("blocks", FieldRule::units()).nested("blocks", WrapPolicy::each(block.clone()));
        let names = unit_names(&policy, &[("blocks.0.gate.w", &[2]), ("blocks.0.experts.1.w", &[2])]);
        assert_eq!(names, ["blocks.0", "blocks.0.experts.1"]);
    }

    #[test]
    fn ignored_parameters_are_not_planned() {
        let policy = WrapPolicy::new().field("teacher", FieldRule::ignore());
        let list = params(&[("teacher.w", &[2]), ("student.w", &[2])]);
        let plan = Plan::new(&policy, &list, &Mesh::one_dim(2), Stage::Parameters).unwrap();
        assert_eq!(plan.ignored(), ["teacher.w"]);
        assert_eq!(plan.num_params(), 2);
        let nothing = Plan::new(&policy, &list[..1], &Mesh::one_dim(2), Stage::Parameters);
        assert_eq!(nothing, Err(PlanError::NoParameters));
    }

    #[test]
    fn a_parameter_whose_shape_is_read_is_whole_where_parameters_are_cut() {
        let norm = ParamSpec { shape_is_read: true, ..params(&[("norm.gamma", &[8])]).remove(0) };
        let list = [norm, params(&[("linear.w", &[8])]).remove(0)];
        for stage in Stage::ALL {
            let plan = Plan::new(&WrapPolicy::new(), &list, &Mesh::one_dim(2), stage).unwrap();
            let split: Vec<_> = plan.params().iter().map(PlannedParam::is_split).collect();
            let cut = stage != Stage::Ddp;
            assert_eq!(split, [cut && stage != Stage::Parameters, cut], "{stage}");
        }
    }

    #[test]
    fn a_policy_that_matches_nothing_warns() {
        let policy = WrapPolicy::new().field("blokcs", FieldRule::units());
        let plan = Plan::new(&policy, &params(&[("blocks.0.w", &[2])]), &Mesh::one_dim(2), Stage::Parameters).unwrap();
        let expected = [PlanWarning::RuleMatchesNothing { path: "blokcs".into() }, PlanWarning::NoUnits];
        assert_eq!(plan.warnings(), expected);
    }

    #[test]
    fn a_unit_with_most_parameters_warns_with_its_share() {
        let policy = WrapPolicy::new().field("a", FieldRule::unit()).field("b", FieldRule::unit());
        let list = params(&[("a.w", &[9]), ("b.w", &[1])]);
        let plan = Plan::new(&policy, &list, &Mesh::one_dim(2), Stage::Parameters).unwrap();
        assert_eq!(plan.warnings(), [PlanWarning::LargeUnit { unit: "a".into(), share: 0.9 }]);
        assert!(plan.warnings()[0].to_string().contains("`a` holds 90%"));
    }

    #[test]
    fn a_large_table_that_its_op_holds_warns_unless_it_stays_gathered_anyway() {
        let table = |rows: usize| ParamSpec { held_by_op: true, ..params(&[("tokens.w", &[rows, 256])]).remove(0) };
        let rest = params(&[("a.w", &[2000, 256]), ("b.w", &[2000, 256])]);
        let warnings = |rule: FieldRule, rows: usize, stage| {
            let policy = WrapPolicy::new().field("tokens", rule).field("a", FieldRule::unit());
            let list = [&[table(rows)], &rest[..]].concat();
            Plan::new(&policy, &list, &Mesh::one_dim(2), stage).unwrap().warnings().to_vec()
        };
        let held = warnings(FieldRule::unit(), 1024, Stage::Parameters);
        assert_eq!(held, [PlanWarning::HeldTable { path: "tokens.w".into(), bytes: 1 << 20 }]);
        assert!(held[0].to_string().contains("`tokens.w`") && held[0].to_string().contains("1.0 MiB"), "{}", held[0]);
        for (rule, rows, stage) in [
            (FieldRule::unit(), 1023, Stage::Parameters),
            (FieldRule::unit().keep(), 1024, Stage::Parameters),
            (FieldRule::unit().replicate(), 1024, Stage::Parameters),
            (FieldRule::unit(), 1024, Stage::Gradients),
        ] {
            assert_eq!(warnings(rule, rows, stage), []);
        }
    }

    /// A table in a unit that is tied to the parameter of a head.
    fn tied(table: FieldRule, head: FieldRule) -> Result<Plan, PlanError> {
        let policy = WrapPolicy::new().field("tokens", table).field("block", FieldRule::unit()).field("head", head);
        let mut list = params(&[("tokens.w", &[6, 4]), ("block.w", &[6, 4]), ("norm.w", &[4])]);
        list[0].also.push(vec!["head".into(), "w".into()]);
        Plan::new(&policy, &list, &Mesh::one_dim(2), Stage::Parameters)
    }

    #[test]
    fn a_tied_parameter_is_planned_once_and_the_table_says_where_else_it_is_used() {
        let plan = tied(FieldRule::unit(), FieldRule::unit().keep()).unwrap();
        assert_eq!((plan.num_params(), plan.params().len(), plan.warnings()), (52, 3, &[][..]));
        let expected = "\
unit    parameters  logical  local
tokens           1       24     12  also used as head.w
block            1       24     12
root             1        4      2  stays gathered
total            3       52     26  elements
";
        assert_eq!(plan.table(0), expected);
        let ignored = tied(FieldRule::ignore(), FieldRule::ignore()).unwrap();
        assert_eq!(ignored.ignored(), ["tokens.w", "head.w"]);
    }

    #[test]
    fn fields_of_one_parameter_that_say_different_things_are_refused() {
        let columns = FieldRule::unit().spec([None, Some("shard")]);
        for (head, as_head) in
            [(FieldRule::root().replicate(), "replicated"), (FieldRule::ignore(), "ignored"), (columns, "dimension 1")]
        {
            let error = tied(FieldRule::unit(), head).unwrap_err().to_string();
            for part in ["`head.w`", "`tokens.w`", "tied weights", as_head, "cut along dimension 0"] {
                assert!(error.contains(part), "{error:?} lacks {part:?}");
            }
        }
    }

    #[test]
    fn the_table_shows_logical_and_local_sizes() {
        let policy = WrapPolicy::new().field("blocks", FieldRule::units()).field("gate", FieldRule::root().replicate());
        let list = params(&[("blocks.0.w", &[1000, 3]), ("gate.w", &[5])]);
        let plan = Plan::new(&policy, &list, &Mesh::one_dim(4), Stage::Parameters).unwrap();
        let table = plan.table(0);
        let expected = "\
unit      parameters  logical  local
blocks.0           1    3,000    750
root               1        5      5  stays gathered, replicated
total              2    3,005    755  elements
";
        assert_eq!(table, expected);
    }
}
