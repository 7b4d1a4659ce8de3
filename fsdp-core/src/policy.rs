//! Which fields of a model become which units: what `#[derive(Sharded)]` writes down, before any model exists.

/// What one field says about its parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldRule {
    /// Which unit the field's parameters belong to.
    pub role: Role,
    /// Stay gathered between forward and backward: no second gather, at the price of the unit's full size in memory.
    pub keep: bool,
    /// Do not cut: every rank holds the whole, and gradients are all-reduced.
    pub replicate: bool,
    /// Mesh axis per tensor dimension; `None` where the default (dimension 0 over the shard axis) applies.
    pub spec: Option<Vec<Option<String>>>,
    /// Per-unit settings that win over the configuration.
    pub overrides: UnitOverrides,
}

/// The role of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The field is one unit.
    Unit,
    /// Every element of the field (of a `Vec`, an array, the `Some` of an `Option`) is a unit.
    Units,
    /// The field belongs to the unit around it; at the top, to the root unit.
    Root,
    /// Not managed: the field's parameters stay plain Burn parameters.
    Ignore,
}

/// Settings of a unit that win over the configuration file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnitOverrides {
    /// Units gathered ahead of this one.
    pub prefetch: Option<usize>,
    /// Element type of computation and gather, by its name in the configuration file.
    pub precision: Option<String>,
    /// Element type in which gradients are sent, by the same name.
    pub reduce: Option<String>,
    /// Element type that the unit's output is cast to, by the same name.
    pub output: Option<String>,
    /// Tier of the unit's parameters, gradients and optimizer state: `none`, `cpu` or `nvme`.
    pub offload: Option<String>,
}

impl FieldRule {
    /// The field is one unit.
    pub fn unit() -> Self {
        Self::new(Role::Unit)
    }

    /// Every element of the field is a unit.
    pub fn units() -> Self {
        Self::new(Role::Units)
    }

    /// The field belongs to the unit around it.
    pub fn root() -> Self {
        Self::new(Role::Root)
    }

    /// The field is not managed.
    pub fn ignore() -> Self {
        Self::new(Role::Ignore)
    }

    /// Sets [`FieldRule::keep`].
    pub fn keep(mut self) -> Self {
        self.keep = true;
        self
    }

    /// Sets [`FieldRule::replicate`].
    pub fn replicate(mut self) -> Self {
        self.replicate = true;
        self
    }

    /// Sets [`FieldRule::spec`]: one entry per tensor dimension, `None` for a dimension that is not cut.
    pub fn spec<'a>(mut self, axes: impl IntoIterator<Item = Option<&'a str>>) -> Self {
        self.spec = Some(axes.into_iter().map(|axis| axis.map(str::to_owned)).collect());
        self
    }

    /// Sets [`UnitOverrides::prefetch`].
    pub fn prefetch(mut self, depth: usize) -> Self {
        self.overrides.prefetch = Some(depth);
        self
    }

    /// Sets [`UnitOverrides::precision`].
    pub fn precision(mut self, name: &str) -> Self {
        self.overrides.precision = Some(name.to_owned());
        self
    }

    /// Sets [`UnitOverrides::reduce`].
    pub fn reduce(mut self, name: &str) -> Self {
        self.overrides.reduce = Some(name.to_owned());
        self
    }

    /// Sets [`UnitOverrides::output`].
    pub fn output(mut self, name: &str) -> Self {
        self.overrides.output = Some(name.to_owned());
        self
    }

    /// Sets [`UnitOverrides::offload`].
    pub fn offload(mut self, tier: &str) -> Self {
        self.overrides.offload = Some(tier.to_owned());
        self
    }

    fn new(role: Role) -> Self {
        Self { role, keep: false, replicate: false, spec: None, overrides: UnitOverrides::default() }
    }
}

/// The rules of a model type, each with the path of its field.
///
/// A path component `*` stands for any index of a `Vec` or an array. Where several rules match a parameter, the
/// longest path wins.
///
/// ```
/// use fsdp_core::{FieldRule, WrapPolicy};
///
/// let block = WrapPolicy::new().field("experts", FieldRule::units());
/// let model = WrapPolicy::new()
///     .field("head", FieldRule::unit().keep())
///     .nested("blocks", WrapPolicy::each(block));
/// let paths: Vec<_> = model.rules().iter().map(|(path, _)| path.join(".")).collect();
/// assert_eq!(paths, ["head", "blocks.*.experts"]);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WrapPolicy {
    rules: Vec<(Vec<String>, FieldRule)>,
}

impl WrapPolicy {
    /// A policy without rules: one root unit.
    pub fn new() -> Self {
        Self::default()
    }

    /// The policy of a `Vec`, an array: `element` for each index.
    pub fn each(element: WrapPolicy) -> Self {
        Self::new().nested("*", element)
    }

    /// Adds a rule for the field (or the enum variant) `name`.
    pub fn field(mut self, name: &str, rule: FieldRule) -> Self {
        self.rules.push((vec![name.to_owned()], rule));
        self
    }

    /// Adds the rules of the field's own type, their paths prefixed with `name`.
    pub fn nested(mut self, name: &str, policy: WrapPolicy) -> Self {
        for (mut path, rule) in policy.rules {
            path.insert(0, name.to_owned());
            self.rules.push((path, rule));
        }
        self
    }

    /// The rules with the path of each, in the order of declaration.
    pub fn rules(&self) -> &[(Vec<String>, FieldRule)] {
        &self.rules
    }

    /// Whether what lies at `path` is not managed.
    ///
    /// ```
    /// use fsdp_core::{FieldRule, WrapPolicy};
    ///
    /// let policy = WrapPolicy::new().field("teacher", FieldRule::ignore()).field("student", FieldRule::unit());
    /// let path = |path: &str| path.split('.').map(str::to_owned).collect::<Vec<_>>();
    /// assert!(policy.ignores(&path("teacher.head.weight")) && !policy.ignores(&path("student.weight")));
    /// ```
    pub fn ignores(&self, path: &[String]) -> bool {
        self.rules.iter().any(|(pattern, rule)| rule.role == Role::Ignore && matches(pattern, path))
    }
}

/// Whether a rule's path leads to what lies at `path`.
pub(crate) fn matches(pattern: &[String], path: &[String]) -> bool {
    let component = |(pattern, part): (&String, &String)| pattern == part || (pattern == "*" && is_index(part));
    pattern.len() <= path.len() && pattern.iter().zip(path).all(component)
}

pub(crate) fn is_index(part: &str) -> bool {
    !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit())
}
