//! Pictures of digits, drawn by the program: a data set that is the same on every machine, with nothing to fetch.

use burn::data::dataloader::batcher::Batcher;
use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::Random;

/// Rows and columns of a picture.
pub const SIDE: usize = 12;

/// Five columns and seven rows of each digit, the top row first, in the lowest five bits.
const GLYPHS: [[u8; 7]; 10] = [
    [0b01110, 0b10001, 0b10011, 0b10101, 0b11001, 0b10001, 0b01110],
    [0b00100, 0b01100, 0b00100, 0b00100, 0b00100, 0b00100, 0b01110],
    [0b01110, 0b10001, 0b00001, 0b00010, 0b00100, 0b01000, 0b11111],
    [0b11111, 0b00010, 0b00100, 0b00010, 0b00001, 0b10001, 0b01110],
    [0b00010, 0b00110, 0b01010, 0b10010, 0b11111, 0b00010, 0b00010],
    [0b11111, 0b10000, 0b11110, 0b00001, 0b00001, 0b10001, 0b01110],
    [0b00110, 0b01000, 0b10000, 0b11110, 0b10001, 0b10001, 0b01110],
    [0b11111, 0b00001, 0b00010, 0b00100, 0b01000, 0b01000, 0b01000],
    [0b01110, 0b10001, 0b10001, 0b01110, 0b10001, 0b10001, 0b01110],
    [0b01110, 0b10001, 0b10001, 0b01111, 0b00001, 0b00010, 0b01100],
];

/// A picture and the digit in it.
#[derive(Clone, Debug)]
pub struct Digit {
    /// Brightness by row and column, around 0 to 1.
    pub pixels: Vec<f32>,
    /// 0 to 9.
    pub class: usize,
}

/// Pictures as tensors.
#[derive(Clone, Debug)]
pub struct Digits {
    /// [batch, 1, [`SIDE`], [`SIDE`]]
    pub pictures: Tensor<4>,
    /// One for each picture.
    pub classes: Tensor<1, Int>,
}

/// The picture `index` of a data set: a digit somewhere, slanted, more or less bright, in noise.
pub fn draw(seed: u64, index: usize) -> Digit {
    let mut random = Random::new(&[seed, index as u64]);
    let class = random.below(10);
    let (left, top) = (2.5 + 2.0 * random.uniform(), 1.5 + 2.0 * random.uniform());
    let (slant, bright) = (random.uniform() - 0.5, 0.5 + 0.5 * random.uniform());
    let mut pixel = |row: usize, column: usize| {
        let y = row as f64 - top;
        let x = column as f64 - left + slant * (y - 3.0);
        let (row, column) = (y.round(), x.round());
        let is_inside = (0.0..7.0).contains(&row) && (0.0..5.0).contains(&column);
        let is_ink = is_inside && GLYPHS[class][row as usize] >> (4 - column as usize) & 1 == 1;
        let ink = if is_ink { bright } else { 0.0 };
        (ink + 0.4 * (random.uniform() - 0.5)) as f32
    };
    let places = (0..SIDE).flat_map(|row| (0..SIDE).map(move |column| (row, column)));
    Digit { pixels: places.map(|(row, column)| pixel(row, column)).collect(), class }
}

/// Makes batches of pictures.
#[derive(Clone, Debug)]
pub struct DigitBatcher;

impl Batcher<Digit, Digits> for DigitBatcher {
    fn batch(&self, digits: Vec<Digit>, device: &Device) -> Digits {
        let classes: Vec<i64> = digits.iter().map(|digit| digit.class as i64).collect();
        let pixels: Vec<f32> = digits.into_iter().flat_map(|digit| digit.pixels).collect();
        let shape = [classes.len(), 1, SIDE, SIDE];
        let classes = Tensor::from_data(TensorData::new(classes, [shape[0]]), device);
        Digits { pictures: Tensor::from_data(TensorData::new(pixels, shape), device), classes }
    }
}

/// The order in which one device, with batches `num_ranks` times as large, sees the same items in each step as ranks do
/// that each have a consecutive part of the data.
///
/// ```
/// assert_eq!(fsdp_examples::in_steps((0..8).collect(), 2, 2), [0, 1, 4, 5, 2, 3, 6, 7]);
/// ```
///
/// # Panics
/// If the parts are not whole numbers of batches.
pub fn in_steps<T>(items: Vec<T>, num_ranks: usize, batch_size: usize) -> Vec<T> {
    let part = items.len() / num_ranks;
    assert!(part.is_multiple_of(batch_size) && part * num_ranks == items.len(), "every rank has whole batches");
    let mut items: Vec<_> = items.into_iter().map(Some).collect();
    let index = |step: usize, rank: usize, item: usize| rank * part + step * batch_size + item;
    let steps = 0..part / batch_size;
    let order = steps.flat_map(|step| (0..num_ranks).map(move |rank| (step, rank)));
    let order = order.flat_map(|(step, rank)| (0..batch_size).map(move |item| index(step, rank, item)));
    order.filter_map(|index| items[index].take()).collect()
}
