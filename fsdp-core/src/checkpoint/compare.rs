//! What a model needs against what a checkpoint has: all differences at once, with what to do about each kind.

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;

use super::{Checkpoint, CheckpointError, StoredDtype, TensorKind};

/// A tensor that a model or an optimizer has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpectedTensor {
    /// Its name.
    pub name: String,
    /// Its logical shape, in elements.
    pub shape: Vec<usize>,
    /// Its element type; `None` where any will do, because the caller converts.
    pub dtype: Option<StoredDtype>,
}

/// A tensor that has another shape or element type in the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongTensor {
    /// What is expected.
    pub expected: ExpectedTensor,
    /// The shape in the checkpoint.
    pub shape: Vec<usize>,
    /// The element type in the checkpoint.
    pub dtype: StoredDtype,
}

/// Every difference between what is expected and what a checkpoint has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Comparison {
    /// The checkpoint, or the file of weights.
    pub path: PathBuf,
    /// Expected names that can be read.
    pub matching: Vec<String>,
    /// Expected, and not in the checkpoint.
    pub missing: Vec<ExpectedTensor>,
    /// In the checkpoint, and not expected.
    pub extra: Vec<String>,
    /// In both, and not alike.
    pub wrong: Vec<WrongTensor>,
}

impl Checkpoint {
    /// Compares what the caller expects with the tensors of these kinds. Reads nothing.
    ///
    /// [`Comparison::strict`] makes any difference an error. Whoever wants to load what there is reads
    /// [`Comparison::matching`], and tells the user the rest, which prints as a list.
    pub fn compare(&self, expected: &[ExpectedTensor], kinds: &[TensorKind]) -> Comparison {
        let (mut matching, mut missing, mut wrong) = (Vec::new(), Vec::new(), Vec::new());
        let mut found = BTreeSet::new();
        for expected in expected {
            match self.tensor(&expected.name).filter(|tensor| kinds.contains(&tensor.kind)) {
                None => missing.push(expected.clone()),
                Some(tensor) => {
                    found.insert(&tensor.name);
                    let is_alike =
                        tensor.shape == expected.shape && expected.dtype.is_none_or(|dtype| dtype == tensor.dtype);
                    if is_alike {
                        matching.push(expected.name.clone());
                    } else {
                        let (shape, dtype) = (tensor.shape.clone(), tensor.dtype);
                        wrong.push(WrongTensor { expected: expected.clone(), shape, dtype });
                    }
                }
            }
        }
        let of_kinds = self.manifest.tensors.iter().filter(|tensor| kinds.contains(&tensor.kind));
        let extra = of_kinds.map(|tensor| &tensor.name).filter(|name| !found.contains(name)).cloned().collect();
        Comparison { path: self.dir.clone(), matching, missing, extra, wrong }
    }
}

impl Comparison {
    /// Whether there is no difference.
    pub fn is_equal(&self) -> bool {
        self.missing.is_empty() && self.extra.is_empty() && self.wrong.is_empty()
    }

    /// Makes any difference an error that lists all of them.
    ///
    /// # Errors
    /// [`CheckpointError::Mismatch`].
    pub fn strict(self) -> Result<(), CheckpointError> {
        if self.is_equal() { Ok(()) } else { Err(CheckpointError::Mismatch(Box::new(self))) }
    }
}

/// All differences, a line for each tensor, and after each kind what to do.
impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, matching, missing, extra, wrong } = self;
        if self.is_equal() {
            return write!(f, "{}: all {} tensors match", path.display(), matching.len());
        }
        let counts = (matching.len(), missing.len(), extra.len(), wrong.len());
        write!(
            f,
            "{} does not fit the model: {} tensors match, {} are missing, {} extra, {} wrong",
            path.display(),
            counts.0,
            counts.1,
            counts.2,
            counts.3
        )?;
        for tensor in missing {
            write!(f, "\n  missing: `{}` {:?}", tensor.name, tensor.shape)?;
        }
        for name in extra {
            write!(f, "\n  extra:   `{name}`")?;
        }
        for WrongTensor { expected, shape, dtype } in wrong {
            write!(f, "\n  wrong:   `{}` is {dtype} {shape:?}, the model has ", expected.name)?;
            match expected.dtype {
                Some(dtype) => write!(f, "{dtype} {:?}", expected.shape)?,
                None => write!(f, "{:?}", expected.shape)?,
            }
        }
        if !missing.is_empty() || !extra.is_empty() {
            f.write_str(
                "\nIf a layer was renamed, give it its old name to load; if tensors are meant to differ, ask for a partial \
                 load, which leaves what is missing as it was initialised, and reports it",
            )?;
        }
        if !wrong.is_empty() {
            f.write_str(
                "\nWrong shapes mean another configuration of the model, which a checkpoint has under `config`, or another layout \
                 of its weights",
            )?;
        }
        Ok(())
    }
}
