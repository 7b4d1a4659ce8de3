//! What single DeepSpeed keys set here.

use super::keys::{Fate, Told, number};
use super::{TranslatedItem, Translator};
use crate::config::tree::Value;
use crate::config::{Config, ConfigError};
use crate::{Axis, Dtype, LossScale, Mesh, Stage};

/// The three batch sizes, of which two and the number of ranks give the third.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Batch {
    whole: Option<usize>,
    micro: Option<usize>,
    accumulation: Option<usize>,
}

fn set(told: impl Into<String>) -> Result<Told, ConfigError> {
    Ok((Fate::Set, told.into()))
}

fn default_stays(why: &str) -> Result<Told, ConfigError> {
    Ok((Fate::NotNeeded, why.to_owned()))
}

/// A whole number from `min`, also as `5e8`.
pub(super) fn whole(translator: &Translator, key: &str, value: &Value, min: usize) -> Result<usize, ConfigError> {
    let expected = format!("a whole number of at least {min}, or \"auto\"");
    let Some(given) = number(value) else { return Err(translator.wrong_type(key, &expected, value)) };
    if given.fract() != 0.0 || given < min as f64 || given > 9e15 {
        let (key, got) = (key.to_owned(), given.to_string());
        return Err(ConfigError::OutOfRange { at: translator.at(), key, allowed: expected, got });
    }
    Ok(given as usize)
}

pub(super) fn switch(translator: &Translator, key: &str, value: &Value) -> Result<bool, ConfigError> {
    match value {
        Value::Bool(is_on) => Ok(*is_on),
        other => Err(translator.wrong_type(key, "true, false or \"auto\"", other)),
    }
}

pub(super) fn text<'a>(translator: &Translator, key: &str, value: &'a Value) -> Result<&'a str, ConfigError> {
    match value {
        Value::Text(text) => Ok(text),
        other => Err(translator.wrong_type(key, "a text", other)),
    }
}

pub(super) fn unknown_name(
    translator: &Translator,
    key: &str,
    got: &str,
    allowed: &'static [&'static str],
) -> ConfigError {
    let nearest = crate::config::nearest::nearest(got, allowed.iter().copied());
    ConfigError::UnknownName { at: translator.at(), key: key.to_owned(), got: got.to_owned(), nearest, allowed }
}

pub(super) fn stage(translator: &mut Translator, key: &str, value: &Value) -> Result<Told, ConfigError> {
    let number = whole(translator, key, value, 0)?;
    let stage = u8::try_from(number).ok().and_then(|number| Stage::try_from(number).ok());
    match stage {
        Some(stage) => translator.out.config.stage = stage,
        None => {
            let (key, allowed) = (key.to_owned(), "an integer from 0 to 3".to_owned());
            return Err(ConfigError::OutOfRange { at: translator.at(), key, allowed, got: number.to_string() });
        }
    }
    set(format!("stage = {number}"))
}

pub(super) fn train_batch_size(translator: &mut Translator, key: &str, value: &Value) -> Result<Told, ConfigError> {
    // Templates that a program fills in write -1.
    if number(value) == Some(-1.0) {
        return Ok((Fate::Program, "filled in by the program".to_owned()));
    }
    translator.batch.whole = Some(whole(translator, key, value, 1)?);
    set("") // what it says is known when all keys are
}

pub(super) fn micro_batch_size(translator: &mut Translator, key: &str, value: &Value) -> Result<Told, ConfigError> {
    if number(value) == Some(-1.0) {
        return Ok((Fate::Program, "filled in by the program".to_owned()));
    }
    translator.batch.micro = Some(whole(translator, key, value, 1)?);
    Ok((Fate::Program, "the program makes batches".to_owned()))
}

pub(super) fn gradient_accumulation(
    translator: &mut Translator,
    key: &str,
    value: &Value,
) -> Result<Told, ConfigError> {
    let steps = whole(translator, key, value, 1)?;
    translator.batch.accumulation = Some(steps);
    set(format!("training.gradient_accumulation = {steps}"))
}

pub(super) fn gradient_clipping(translator: &mut Translator, key: &str, value: &Value) -> Result<Told, ConfigError> {
    let norm = number(value).filter(|norm| norm.is_finite() && *norm >= 0.0);
    match norm {
        None => Err(translator.wrong_type(key, "a number of at least 0, or \"auto\"", value)),
        Some(0.0) => default_stays("0 is no clipping, as the default"),
        Some(norm) => {
            translator.out.config.training.gradient_clip_norm = Some(norm);
            set(format!("training.gradient_clip_norm = {norm:?}"))
        }
    }
}

pub(super) fn bf16(translator: &mut Translator, key: &str, value: &Value) -> Result<Told, ConfigError> {
    half(translator, key, value, Dtype::Bf16)
}

pub(super) fn fp16(translator: &mut Translator, key: &str, value: &Value) -> Result<Told, ConfigError> {
    half(translator, key, value, Dtype::F16)
}

fn half(translator: &mut Translator, key: &str, value: &Value, dtype: Dtype) -> Result<Told, ConfigError> {
    if !switch(translator, key, value)? {
        return default_stays("it is switched off");
    }
    let precision = &mut translator.out.config.precision;
    if precision.parameters != Dtype::F32 && precision.parameters != dtype {
        let keys = ["fp16.enabled", "bf16.enabled"];
        return Err(ConfigError::Conflict { at: translator.at(), keys, why: "parameters have one element type" });
    }
    precision.parameters = dtype;
    set(format!("precision.parameters = \"{dtype}\""))
}

pub(super) fn loss_scale(translator: &mut Translator, key: &str, value: &Value) -> Result<Told, ConfigError> {
    match number(value).filter(|scale| scale.is_finite() && *scale >= 0.0) {
        None => Err(translator.wrong_type(key, "a number of at least 0", value)),
        Some(0.0) => default_stays("0 is a dynamic scale, the default with f16"),
        Some(scale) => {
            translator.out.config.precision.loss_scale = Some(LossScale::Fixed(scale));
            set(format!("precision.loss_scale = {scale:?}"))
        }
    }
}

pub(super) fn fp32_allreduce(translator: &mut Translator, key: &str, value: &Value) -> Result<Told, ConfigError> {
    switch(translator, key, value)?;
    default_stays("gradients are sent in float32 unless precision.reduce says otherwise")
}

pub(super) fn communication_data_type(
    translator: &mut Translator,
    key: &str,
    value: &Value,
) -> Result<Told, ConfigError> {
    const NAMES: &[&str] = &["fp32", "bf16", "bfp16", "fp16"];
    if matches!(value, Value::Other("null")) {
        return default_stays("null is the default");
    }
    let name = text(translator, key, value)?;
    let dtype = match name {
        "fp32" => Dtype::F32,
        "bf16" | "bfp16" => Dtype::Bf16,
        "fp16" => Dtype::F16,
        other => return Err(unknown_name(translator, key, other, NAMES)),
    };
    translator.out.config.precision.reduce = dtype;
    set(format!("precision.reduce = \"{dtype}\""))
}

pub(super) fn optimizer_type(translator: &mut Translator, key: &str, value: &Value) -> Result<Told, ConfigError> {
    let name = text(translator, key, value)?;
    let told = match name.to_ascii_lowercase().as_str() {
        "adam" | "adamw" | "fusedadam" | "deepspeedcpuadam" => "rank.optimizer(FusedAdamW::new(..)) or AdamWConfig",
        "sgd" | "rmsprop" | "adagrad" | "deepspeedcpuadagrad" => "rank.optimizer(..) of Burn's optimizer of that name",
        "lamb" | "fusedlamb" | "muon" => {
            let told = "it looks at whole tensors, and is refused where a tensor is split";
            return Ok((Fate::Missing, told.to_owned()));
        }
        "onebitadam" | "zerooneadam" | "onebitlamb" => {
            return Ok((Fate::Missing, "gradients are not compressed to bits".to_owned()));
        }
        _ => "rank.optimizer(..); any elementwise Burn optimizer",
    };
    Ok((Fate::Program, told.to_owned()))
}

pub(super) fn learning_rate(translator: &mut Translator, key: &str, value: &Value) -> Result<Told, ConfigError> {
    let rate = number(value).filter(|rate| rate.is_finite());
    let Some(rate) = rate else { return Err(translator.wrong_type(key, "a number, or \"auto\"", value)) };
    translator.out.learning_rate = Some(rate);
    Ok((Fate::Program, "the program gives it to each step".to_owned()))
}

pub(super) fn max_live_parameters(translator: &mut Translator, key: &str, value: &Value) -> Result<Told, ConfigError> {
    let elements = whole(translator, key, value, 0)?;
    if elements == 0 {
        return no_prefetch(translator);
    }
    // Elements become bytes when the element type is known, at the end.
    translator.out.config.prefetch.max_bytes = Some(elements);
    set("prefetch.max_bytes, that many elements in bytes")
}

pub(super) fn prefetch_bucket_size(translator: &mut Translator, key: &str, value: &Value) -> Result<Told, ConfigError> {
    match whole(translator, key, value, 0)? {
        0 => no_prefetch(translator),
        _ => default_stays("prefetch.forward and prefetch.backward count units ahead, one by default"),
    }
}

fn no_prefetch(translator: &mut Translator) -> Result<Told, ConfigError> {
    let prefetch = &mut translator.out.config.prefetch;
    (prefetch.forward, prefetch.backward) = (0, 0);
    set("prefetch.forward = 0, prefetch.backward = 0")
}

pub(super) fn mics_shard_size(translator: &mut Translator, key: &str, value: &Value) -> Result<Told, ConfigError> {
    if number(value) == Some(-1.0) {
        return default_stays("-1 is no MiCS");
    }
    translator.mics = Some(whole(translator, key, value, 1)?);
    set("mesh: that many ranks along `shard`, the others along `replicate`")
}

pub(super) fn hpz_partition_size(translator: &mut Translator, key: &str, value: &Value) -> Result<Told, ConfigError> {
    match whole(translator, key, value, 1)? {
        1 => default_stays("1 is no second partition"),
        num_ranks => {
            translator.hpz = Some(num_ranks);
            set(format!("reshard_after_forward = {num_ranks}"))
        }
    }
}

pub(super) const DEVICES: &[&str] = &["none", "cpu", "nvme"];

impl Translator<'_> {
    /// What only all keys together can say.
    pub(super) fn finish(&mut self, num_ranks: Option<usize>) -> Result<(), ConfigError> {
        let Batch { whole, micro, accumulation } = self.batch;
        let product = |a: usize, b: usize| a.saturating_mul(b);
        let ranks = match (num_ranks, whole, micro, accumulation) {
            (Some(ranks), ..) => ranks,
            (None, Some(whole), Some(micro), Some(steps)) => self.divided(whole, product(micro, steps))?,
            (None, ..) => 1,
        };
        // DeepSpeed's own rules: two sizes give the third, and what is not given is 1.
        let (micro, accumulation) = match (whole, micro, accumulation) {
            (Some(whole), Some(micro), None) if num_ranks.is_some() => {
                (Some(micro), self.divided(whole, product(micro, ranks))?)
            }
            (Some(whole), None, steps) if num_ranks.is_some() => {
                let steps = steps.unwrap_or(1);
                (Some(self.divided(whole, product(steps, ranks))?), steps)
            }
            (Some(whole), Some(micro), Some(steps)) => {
                if product(product(micro, steps), ranks) != whole {
                    self.divided(whole, product(product(micro, steps), ranks))?;
                    return Err(self.batch_sizes(whole, product(product(micro, steps), ranks)));
                }
                (Some(micro), steps)
            }
            (_, micro, steps) => (micro, steps.unwrap_or(1)),
        };
        let precision = &self.out.config.precision;
        let why = match (precision.parameters, precision.loss_scale) {
            (Dtype::F16, Some(LossScale::Fixed(_))) => Some("the scale is fixed"),
            (Dtype::F16, _) => None,
            _ => Some("fp16 is not switched on"),
        };
        if let Some(why) = why {
            let is_scale = |item: &&mut TranslatedItem| item.key.starts_with("fp16.") && item.fate == Fate::Missing;
            for item in self.out.items.iter_mut().filter(is_scale) {
                (item.fate, item.told) = (Fate::NotNeeded, why.to_owned());
            }
        }
        let is_open = num_ranks.is_none() && whole.is_some() && (micro.is_none() || self.batch.accumulation.is_none());
        let is_it = |item: &&mut TranslatedItem| item.key == "train_batch_size" && item.fate == Fate::Set;
        if let Some(item) = self.out.items.iter_mut().find(is_it) {
            (item.fate, item.told) = match (is_open, micro) {
                (false, Some(micro)) => {
                    (Fate::Set, format!("{ranks} ranks, {accumulation} micro-batches of {micro} sequences"))
                }
                _ => (Fate::Missing, "it needs the number of ranks, which the file does not hold; give it".to_owned()),
            };
        }
        self.finish_offload();
        self.out.micro_batch_size = micro;
        let Config { world_size, training, prefetch, precision, .. } = &mut self.out.config;
        *world_size = ranks;
        training.gradient_accumulation = accumulation;
        prefetch.max_bytes = prefetch.max_bytes.map(|len| len.saturating_mul(precision.parameters.size_bytes()));
        if let Some(shards) = self.mics.filter(|&shards| shards != ranks) {
            self.divides(ranks, "mics_shard_size", shards)?;
            let axes = [(Axis::Replicate, ranks / shards), (Axis::Shard, shards)];
            let mesh = Mesh::new(axes).map_err(|source| ConfigError::InvalidMesh { at: self.at(), source })?;
            self.out.config.mesh = Some(mesh);
        }
        self.finish_hpz()
    }

    /// ZeRO++'s second partition is what `reshard_after_forward` is: backward gathers among those ranks.
    fn finish_hpz(&mut self) -> Result<(), ConfigError> {
        let Some(num_ranks) = self.hpz else { return Ok(()) };
        let config = &mut self.out.config;
        if !config.stage.shards_parameters() {
            let told = format!("stage {} gathers no parameters for backward", config.stage.number());
            let is_it = |item: &&mut TranslatedItem| item.key == "zero_optimization.zero_hpz_partition_size";
            if let Some(item) = self.out.items.iter_mut().find(is_it) {
                (item.fate, item.told) = (Fate::NotNeeded, told);
            }
            return Ok(());
        }
        config.reshard_after_forward = Some(num_ranks);
        // One rank: how many there will be is not known.
        match config.resolved_mesh().size(Axis::Shard) {
            1 => Ok(()),
            shards => self.divides(shards, "zero_hpz_partition_size", num_ranks),
        }
    }

    fn divides(&self, ranks: usize, key: &str, by: usize) -> Result<(), ConfigError> {
        if ranks.is_multiple_of(by) {
            return Ok(());
        }
        Err(ConfigError::OutOfRange {
            at: self.at(),
            key: format!("zero_optimization.{key}"),
            allowed: format!("a divisor of the {ranks} ranks"),
            got: by.to_string(),
        })
    }

    fn divided(&self, whole: usize, by: usize) -> Result<usize, ConfigError> {
        match by {
            0 => Err(self.batch_sizes(whole, by)),
            _ if !whole.is_multiple_of(by) => Err(self.batch_sizes(whole, by)),
            _ => Ok(whole / by),
        }
    }

    fn batch_sizes(&self, whole: usize, by: usize) -> ConfigError {
        ConfigError::OutOfRange {
            at: self.at(),
            key: "train_batch_size".to_owned(),
            allowed: format!(
                "train_micro_batch_size_per_gpu x gradient_accumulation_steps x the number of ranks, a multiple of {by}"
            ),
            got: whole.to_string(),
        }
    }
}
