//! The options that say which model is trained, and how.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use fsdp_core::{Activations, ComputePrecision, Config, Dtype, MOST_ELEMENTS, ModelShape, OptimizerKind, Transformer};

use crate::number::{MOST, MOST_UNITS, parse_count, up_to};
use crate::size::parse_size;

#[derive(Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelArgs {
    /// Number of parameters, such as 7e9 or 7B, in equal units
    #[arg(long, value_name = "COUNT", value_parser = parse_count, group = "model")]
    params: Option<u64>,
    /// Units of equal size that --params are in
    #[arg(long, value_name = "N", default_value = "32", value_parser = up_to(MOST_UNITS))]
    units: usize,
    /// Shape file, as `ModelShape::of(model.plan()).write(path)` writes it
    #[arg(long, value_name = "FILE", group = "model")]
    shape: Option<PathBuf>,
    /// Blocks of a transformer
    #[arg(long, value_name = "N", group = "model", requires = "width", value_parser = up_to(MOST_UNITS))]
    layers: Option<usize>,
    /// Length of the vector of one position
    #[arg(long, value_name = "N", requires = "layers", value_parser = up_to(MOST))]
    width: Option<usize>,
    /// Attention heads; they divide the width [default: one for each 64 of the width]
    #[arg(long, value_name = "N", requires = "layers", value_parser = up_to(MOST))]
    heads: Option<usize>,
    /// Rows of the table of tokens
    #[arg(long, value_name = "N", default_value = "50257", value_parser = up_to(MOST))]
    vocabulary: usize,
    /// Tokens of a sequence
    #[arg(long, value_name = "N", default_value = "2048", value_parser = up_to(MOST))]
    sequence: usize,
    /// Sequences of a rank in one micro-batch
    #[arg(long, value_name = "N", default_value = "1", value_parser = up_to(MOST))]
    batch: usize,
    /// Element type of parameters, gradients and activations; with 16 bits, float32 master weights [default: the
    /// configuration's, which is f32 unless it says otherwise]
    #[arg(long, value_enum)]
    pub(crate) precision: Option<Precision>,
    /// The optimizer
    #[arg(long, value_enum, default_value_t = Optimizer::Adam)]
    optimizer: Optimizer,
    /// Blocks keep their input only, and run again in backward
    #[arg(long)]
    recompute: bool,
    /// What forward keeps for backward on a rank; known without it for --layers
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    activations: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Precision {
    F32,
    Bf16,
    F16,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Optimizer {
    /// Adam and AdamW: two moments
    Adam,
    /// SGD with momentum: one
    SgdMomentum,
    /// Plain SGD: none
    Sgd,
}

/// The model, and what is said of it in the report.
pub(crate) struct Model {
    pub(crate) shape: ModelShape,
    pub(crate) optimizer: OptimizerKind,
    pub(crate) num_tokens: u64,
    pub(crate) recompute: bool,
    pub(crate) activations: Option<Activations>,
    pub(crate) told: String,
    pub(crate) training: String,
}

impl Precision {
    pub(crate) fn dtype(self) -> Dtype {
        match self {
            Precision::F32 => Dtype::F32,
            Precision::Bf16 => Dtype::Bf16,
            Precision::F16 => Dtype::F16,
        }
    }
}

impl ModelArgs {
    /// The model with its training in the element type of the configuration.
    pub(crate) fn model(&self, config: &Config) -> Result<Model, Box<dyn std::error::Error>> {
        let (shape, transformer, told) = self.shape()?;
        let (precision, precision_name) = match config.precision.parameters {
            Dtype::F32 | Dtype::F64 => (ComputePrecision::F32, "float32".to_owned()),
            half => (ComputePrecision::Mixed16, format!("{half} with float32 master weights")),
        };
        let (optimizer, optimizer_name) = match self.optimizer {
            Optimizer::Adam => (OptimizerKind::Adam, "Adam"),
            Optimizer::SgdMomentum => (OptimizerKind::SgdMomentum, "SGD with momentum"),
            Optimizer::Sgd => (OptimizerKind::Sgd, "SGD"),
        };
        let known = transformer.map(|transformer| transformer.activations(self.batch, precision));
        let recompute = if self.recompute { ", blocks recomputed" } else { "" };
        Ok(Model {
            shape,
            optimizer,
            num_tokens: (self.batch * self.sequence) as u64,
            recompute: self.recompute,
            activations: self.activations.map(Activations::from).or(known),
            told,
            training: format!(
                "{precision_name}, {optimizer_name}, {} x {} tokens on each rank{recompute}",
                self.batch, self.sequence
            ),
        })
    }

    fn shape(&self) -> Result<(ModelShape, Option<Transformer>, String), Box<dyn std::error::Error>> {
        if let Some(params) = self.params {
            let len = usize::try_from(params)?;
            let told = format!("{} equal units (--units)", self.units);
            return Ok((ModelShape::even(len, self.units), None, told));
        }
        if let Some(file) = &self.shape {
            let shape = ModelShape::read(file)?;
            let told = format!("{} units of {}", shape.units.len(), file.display());
            return Ok((shape, None, told));
        }
        let (Some(layers), Some(width)) = (self.layers, self.width) else {
            return Err("there is no model; give --params COUNT, --shape FILE, or --layers N with --width N".into());
        };
        let heads = self.heads.unwrap_or((width / 64).max(1));
        if !width.is_multiple_of(heads) {
            return Err(format!("--heads: {heads} heads do not divide a width of {width}; take a divisor of it").into());
        }
        let (sequence, vocabulary, recompute) = (self.sequence, self.vocabulary, self.recompute);
        let transformer = Transformer { layers, width, heads, sequence, vocabulary, recompute };
        let len = transformer.parameter_len();
        if len > MOST_ELEMENTS {
            return Err(format!(
                "--layers {layers}, --width {width}, --vocabulary {vocabulary} and --sequence {sequence} make {len:.1e} \
                 parameters; at most {:.1e} are counted, make one of them smaller",
                MOST_ELEMENTS as f64
            )
            .into());
        }
        let told = format!("a transformer of {layers} blocks, width {width}, {heads} heads, {vocabulary} tokens");
        Ok((transformer.shape(), Some(transformer), told))
    }
}
