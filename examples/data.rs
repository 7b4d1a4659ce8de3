//! Text as bytes, and batches of it: the same for a given seed, step and row, whatever the number of ranks.

use std::path::Path;

use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::{Failure, Random};

/// The documents and sources of this project, collected by `build.rs`.
const PROJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/project.txt"));

/// A text to learn.
#[derive(Clone, Debug)]
pub struct Text {
    bytes: Vec<u8>,
    origin: String,
    sequence: usize,
}

/// Windows of a text, and the byte that follows each position. Both have shape [batch, sequence].
pub struct Batch {
    /// What the model reads.
    pub inputs: Tensor<2, Int>,
    /// What it should say.
    pub targets: Tensor<2, Int>,
}

impl Text {
    /// The file's bytes, or those of this project, to be cut into windows of `sequence` bytes.
    ///
    /// # Errors
    /// If the file cannot be read, or is too short for one window and the byte after it.
    pub fn load(file: Option<&Path>, sequence: usize) -> Result<Self, Failure> {
        let (bytes, origin) = match file {
            None => (PROJECT.to_vec(), "the project's own text".to_owned()),
            Some(file) => {
                let read = std::fs::read(file);
                (read.map_err(|source| Failure::Data { file: file.into(), source })?, file.display().to_string())
            }
        };
        if bytes.len() <= sequence {
            return Err(Failure::ShortText { origin, got: bytes.len(), sequence });
        }
        Ok(Self { bytes, origin, sequence })
    }

    /// Where the text is from.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// Bytes of the text.
    pub fn num_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Rows `rows` of the global batch of a step, each a window at a random place.
    pub fn batch(&self, seed: u64, step: usize, rows: std::ops::Range<usize>, device: &Device) -> Batch {
        let shape = [rows.len(), self.sequence];
        let mut inputs = Vec::with_capacity(rows.len() * self.sequence);
        let mut targets = Vec::with_capacity(rows.len() * self.sequence);
        for row in rows {
            let mut random = Random::new(&[seed, step as u64, row as u64]);
            let start = random.below(self.bytes.len() - self.sequence);
            let window = &self.bytes[start..=start + self.sequence];
            inputs.extend(window[..self.sequence].iter().map(|&byte| i32::from(byte)));
            targets.extend(window[1..].iter().map(|&byte| i32::from(byte)));
        }
        let tensor = |values: Vec<i32>| Tensor::from_data(TensorData::new(values, shape), device);
        Batch { inputs: tensor(inputs), targets: tensor(targets) }
    }

    /// A window to start generating from.
    pub fn prompt(&self, seed: u64) -> &[u8] {
        let length = self.sequence.div_ceil(2);
        let start = Random::new(&[seed, u64::MAX]).below(self.bytes.len() - length);
        &self.bytes[start..start + length]
    }
}
