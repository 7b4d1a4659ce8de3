//! Text in columns.

/// Rows of cells, the first column to the left and the others to the right.
#[derive(Default)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(header: &[&str]) -> Self {
        Self { rows: vec![header.iter().map(|&cell| cell.to_owned()).collect()] }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        for row in &self.rows {
            let cells = row.iter().enumerate().map(|(column, cell)| match column {
                0 => format!("{cell:<width$}", width = width(column)),
                _ => format!("{cell:>width$}", width = width(column)),
            });
            writeln!(f, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
        }
        Ok(())
    }
}

/// `1234567` as `1,234,567`.
pub(crate) fn grouped(number: u64) -> String {
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

/// Seconds in the unit that fits.
pub(crate) fn seconds(seconds: f64) -> String {
    match seconds {
        s if s >= 100.0 => format!("{s:.0} s"),
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s if s > 0.0 => format!("{:.2} µs", s * 1e6),
        _ => "0".to_owned(),
    }
}

/// A rate, with the prefix that fits.
pub(crate) fn rate(per_second: f64, unit: &str) -> String {
    let prefixes = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    let found = prefixes.into_iter().find(|(size, _)| per_second >= *size);
    let (size, prefix) = found.unwrap_or((1.0, ""));
    format!("{:.1} {prefix}{unit}/s", per_second / size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(&["stage", "µs"]);
        table.row(["0".to_owned(), "12345".to_owned()]);
        assert_eq!(table.to_string(), "stage     µs\n0      12345\n");
    }

    #[test]
    fn numbers_have_the_unit_that_fits() {
        assert_eq!([1.5, 0.0025, 3e-6, 0.0, 250.0].map(seconds), ["1.50 s", "2.50 ms", "3.00 µs", "0", "250 s"]);
        assert_eq!([4.5e11, 3.0].map(|number| rate(number, "B")), ["450.0 GB/s", "3.0 B/s"]);
        assert_eq!([0, 999, 1000, 7_000_000_000].map(grouped), ["0", "999", "1,000", "7,000,000,000"]);
    }
}
