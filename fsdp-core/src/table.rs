//! Text in columns, and numbers that people read.

use std::fmt;

/// Rows of cells under a header: the first column to the left, the others to the right.
///
/// ```
/// use fsdp_core::{Table, grouped};
///
/// let mut table = Table::new(["unit", "elements"]);
/// table.row(["blocks.0", &grouped(1_234_567)]);
/// assert_eq!(table.to_string(), "unit       elements\nblocks.0  1,234,567\n");
/// ```
#[derive(Clone, Debug, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
    has_notes: bool,
}

impl Table {
    /// A table with this header and no rows yet.
    pub fn new<S: Into<String>>(header: impl IntoIterator<Item = S>) -> Self {
        Self { rows: vec![header.into_iter().map(Into::into).collect()], has_notes: false }
    }

    /// Lets the last column begin where the others end, as a remark does.
    #[must_use]
    pub fn with_notes(mut self) -> Self {
        self.has_notes = true;
        self
    }

    /// Adds a row.
    pub fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let num_columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..num_columns).map(width).collect();
        for row in &self.rows {
            let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, width))| match column {
                0 => format!("{cell:<width$}"),
                _ if self.has_notes && column + 1 == num_columns => cell.clone(),
                _ => format!("{cell:>width$}"),
            });
            writeln!(f, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
        }
        Ok(())
    }
}

/// `1234567` as `1,234,567`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(["stage", "µs"]);
        table.row(["0", "12345"]);
        assert_eq!(table.to_string(), "stage     µs\n0      12345\n");
        let mut noted = Table::new(["unit", "bytes", ""]).with_notes();
        noted.row(["a", "7", "stays"]);
        assert_eq!(noted.to_string(), "unit  bytes\na         7  stays\n");
        assert_eq!(Table::default().to_string(), "");
    }

    #[test]
    fn digits_are_grouped_by_three() {
        assert_eq!([0, 999, 1000, 7_000_000_000].map(grouped), ["0", "999", "1,000", "7,000,000,000"]);
        assert_eq!(grouped(u64::MAX), "18,446,744,073,709,551,615");
    }
}
