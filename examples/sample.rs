//! Text from a model, one byte at a time. All ranks generate the same text, since each forward gathers the parameters.

use burn::tensor::{Device, Tensor, TensorData, activation};

use crate::{Gpt, Random};

/// How to generate.
#[derive(Clone, Copy, Debug)]
pub struct Sampler {
    /// Bytes to add.
    pub num_bytes: usize,
    /// 0 takes the likeliest byte, 1 draws as the model says.
    pub temperature: f64,
    /// Seed of the draws, the same on all ranks.
    pub seed: u64,
}

impl Sampler {
    /// Continues `prompt`. The model sees the last `sequence` bytes. *Collective* where the model is sharded.
    pub fn continue_text(&self, model: &Gpt, prompt: &[u8], sequence: usize, device: &Device) -> Vec<u8> {
        let mut random = Random::new(&[self.seed]);
        let mut text = prompt.to_vec();
        for _ in 0..self.num_bytes {
            let window: Vec<i32> = text[text.len().saturating_sub(sequence)..].iter().map(|&b| b.into()).collect();
            let length = window.len();
            let logits = model.forward(Tensor::from_data(TensorData::new(window, [1, length]), device));
            let last = logits.narrow(1, length - 1, 1).narrow(2, 0, 256).reshape([256]);
            text.push(self.choose(last, &mut random));
        }
        text.split_off(prompt.len())
    }

    fn choose(&self, logits: Tensor<1>, random: &mut Random) -> u8 {
        if self.temperature == 0.0 {
            return logits.argmax(0).into_scalar::<i64>() as u8;
        }
        let chances = activation::softmax(logits / self.temperature, 0);
        let mut left = random.uniform() as f32;
        let mut chosen = 0;
        for (byte, chance) in chances.into_data().iter::<f32>().enumerate() {
            chosen = byte as u8;
            left -= chance;
            if left < 0.0 {
                break;
            }
        }
        chosen
    }
}
