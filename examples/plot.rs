//! The losses of a run as a picture.

use std::path::Path;

use plotters::prelude::*;

use crate::Failure;

/// Draws the losses, step by step, and their running mean into an SVG file.
///
/// # Errors
/// If the file cannot be written.
pub fn plot_losses(losses: &[f64], title: &str, file: &Path) -> Result<(), Failure> {
    draw(losses, title, file).map_err(|error| Failure::write(file, error))
}

fn draw(losses: &[f64], title: &str, file: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let top = losses.iter().copied().fold(0.0, f64::max) * 1.05;
    let root = SVGBackend::new(file, (860, 480)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 20))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(56)
        .build_cartesian_2d(1..losses.len().max(2), 0.0..top.max(f64::MIN_POSITIVE))?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_desc("step")
        .y_desc("mean loss over all ranks, nats per byte")
        .label_style(("sans-serif", 14))
        .draw()?;
    let steps = || 1..=losses.len();
    let (light, dark) = (RGBColor(150, 190, 230), RGBColor(20, 80, 160).stroke_width(2));
    let sample = |x, y, style: ShapeStyle| PathElement::new([(x, y), (x + 20, y)], style);
    chart
        .draw_series(LineSeries::new(steps().zip(losses.iter().copied()), light))?
        .label("each step")
        .legend(move |(x, y)| sample(x, y, light.into()));
    chart
        .draw_series(LineSeries::new(steps().zip(smoothed(losses)), dark))?
        .label("mean of 20 steps")
        .legend(move |(x, y)| sample(x, y, dark));
    chart.configure_series_labels().position(SeriesLabelPosition::UpperRight).label_font(("sans-serif", 14)).draw()?;
    root.present()?;
    Ok(())
}

/// The mean of each loss and the up to 19 before it.
fn smoothed(losses: &[f64]) -> impl Iterator<Item = f64> {
    (0..losses.len()).map(|end| {
        let window = &losses[end.saturating_sub(19)..=end];
        window.iter().sum::<f64>() / window.len() as f64
    })
}
