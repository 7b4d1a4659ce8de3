//! What the expansion expects of `fsdp_burn`, small enough for tests without it: a policy is a list of printed rules.

#![allow(dead_code, missing_docs, unreachable_pub)]

pub trait Sharded {
    fn wrap_policy() -> WrapPolicy;
}

impl<T: Sharded> Sharded for Vec<T> {
    fn wrap_policy() -> WrapPolicy {
        WrapPolicy::new().nested("*", T::wrap_policy())
    }
}

impl<T: Sharded, const N: usize> Sharded for [T; N] {
    fn wrap_policy() -> WrapPolicy {
        WrapPolicy::new().nested("*", T::wrap_policy())
    }
}

impl<T: Sharded> Sharded for Option<T> {
    fn wrap_policy() -> WrapPolicy {
        T::wrap_policy()
    }
}

/// The rules in order, as `path: role setting setting`.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct WrapPolicy(pub Vec<String>);

impl WrapPolicy {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn field(mut self, name: &str, rule: FieldRule) -> Self {
        self.0.push(format!("{name}: {}", rule.0));
        self
    }

    pub fn nested(mut self, name: &str, policy: WrapPolicy) -> Self {
        self.0.extend(policy.0.into_iter().map(|rule| format!("{name}.{rule}")));
        self
    }
}

pub struct FieldRule(String);

impl FieldRule {
    pub fn unit() -> Self {
        Self("unit".into())
    }

    pub fn units() -> Self {
        Self("units".into())
    }

    pub fn root() -> Self {
        Self("root".into())
    }

    pub fn ignore() -> Self {
        Self("ignore".into())
    }

    pub fn keep(self) -> Self {
        self.with("keep")
    }

    pub fn replicate(self) -> Self {
        self.with("replicate")
    }

    pub fn spec<'a>(self, axes: impl IntoIterator<Item = Option<&'a str>>) -> Self {
        let axes: Vec<_> = axes.into_iter().map(|axis| axis.unwrap_or("_")).collect();
        self.with(&format!("spec({})", axes.join(", ")))
    }

    pub fn prefetch(self, depth: usize) -> Self {
        self.with(&format!("prefetch={depth}"))
    }

    pub fn precision(self, name: &str) -> Self {
        self.with(&format!("precision={name}"))
    }

    pub fn reduce(self, name: &str) -> Self {
        self.with(&format!("reduce={name}"))
    }

    pub fn output(self, name: &str) -> Self {
        self.with(&format!("output={name}"))
    }

    pub fn offload(self, tier: &str) -> Self {
        self.with(&format!("offload={tier}"))
    }

    fn with(self, setting: &str) -> Self {
        Self(format!("{} {setting}", self.0))
    }
}
