//! Pictures as text: a few shapes that take their colours from the page, so that they fit its light and dark themes.

use std::f64::consts::TAU;
use std::fmt::Write;

/// A picture that is being drawn. Lengths are in its own units, which are pixels at full size.
pub(crate) struct Diagram {
    size: [f64; 2],
    title: String,
    body: String,
}

impl Diagram {
    /// An empty picture of `width` and `height`; `title` is read out in its place.
    pub(crate) fn new(width: f64, height: f64, title: &str) -> Self {
        Self { size: [width, height], title: title.to_owned(), body: String::new() }
    }

    /// Text whose middle, start or end (`anchor`) is at `x`.
    pub(crate) fn text(&mut self, [x, y]: [f64; 2], anchor: &str, text: &str) {
        let text = text.replace('&', "&amp;").replace('<', "&lt;");
        let _ = writeln!(
            self.body,
            "<text x=\"{x:.0}\" y=\"{y:.0}\" text-anchor=\"{anchor}\" fill=\"currentColor\">{text}</text>"
        );
    }

    /// A box around a name.
    pub(crate) fn node(&mut self, [x, y]: [f64; 2], width: f64, name: &str) {
        let left = x - width / 2.0;
        let _ = writeln!(
            self.body,
            "<rect x=\"{left:.0}\" y=\"{:.0}\" width=\"{width:.0}\" height=\"32\" rx=\"8\" fill=\"none\" \
             stroke=\"currentColor\" stroke-width=\"1.5\"/>",
            y - 16.0
        );
        self.text([x, y + 5.0], "middle", name);
    }

    /// A filled bar with what it is, shown where it fits and told to whoever points at it.
    pub(crate) fn bar(&mut self, [x, y]: [f64; 2], [width, height]: [f64; 2], colour: &str, label: &str, full: &str) {
        let _ = writeln!(
            self.body,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" rx=\"2\" \
             fill=\"{colour}\"><title>{full}</title></rect>"
        );
        if width > 7.5 * label.len() as f64 + 4.0 {
            let _ = writeln!(
                self.body,
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#111\">{label}</text>",
                x + width / 2.0,
                y + height / 2.0 + 4.5
            );
        }
    }

    /// An arrow along a curve; `bend` moves its middle to the left of its direction, `label` stands there.
    pub(crate) fn arrow(&mut self, [x1, y1]: [f64; 2], [x2, y2]: [f64; 2], bend: f64, label: &str) {
        let (dx, dy) = (x2 - x1, y2 - y1);
        let len = dx.hypot(dy).max(1.0);
        let middle = [(x1 + x2) / 2.0 + 2.0 * bend * dy / len, (y1 + y2) / 2.0 - 2.0 * bend * dx / len];
        let [mx, my] = middle;
        let _ = writeln!(
            self.body,
            "<path d=\"M{x1:.0} {y1:.0} Q{mx:.0} {my:.0} {x2:.0} {y2:.0}\" fill=\"none\" stroke=\"currentColor\" \
             stroke-width=\"1.5\"/>"
        );
        // The curve arrives from where its middle pulls it to.
        let angle = (y2 - my).atan2(x2 - mx);
        let corner = |turn: f64| [x2 - 9.0 * (angle + turn).cos(), y2 - 9.0 * (angle + turn).sin()];
        let [[ax, ay], [bx, by]] = [corner(TAU / 16.0), corner(-TAU / 16.0)];
        let _ = writeln!(
            self.body,
            "<path d=\"M{x2:.1} {y2:.1} L{ax:.1} {ay:.1} L{bx:.1} {by:.1} Z\" fill=\"currentColor\"/>"
        );
        let top = (y1 + y2) / 4.0 + my / 2.0;
        let below = bend < 0.0 && dx >= 0.0 || bend > 0.0 && dx < 0.0;
        self.text([(x1 + x2) / 4.0 + mx / 2.0, if below { top + 17.0 } else { top - 7.0 }], "middle", label);
    }

    /// A line through `points`, dashed or not.
    pub(crate) fn curve(&mut self, points: impl IntoIterator<Item = [f64; 2]>, colour: &str, dashed: bool) {
        let points: Vec<_> = points.into_iter().map(|[x, y]| format!("{x:.1},{y:.1}")).collect();
        let dashes = if dashed { " stroke-dasharray=\"7 5\"" } else { "" };
        let _ = writeln!(
            self.body,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{dashes}/>",
            points.join(" ")
        );
    }

    /// A thin line.
    pub(crate) fn line(&mut self, [x1, y1]: [f64; 2], [x2, y2]: [f64; 2]) {
        let _ = writeln!(
            self.body,
            "<path d=\"M{x1:.1} {y1:.1} L{x2:.1} {y2:.1}\" stroke=\"currentColor\" stroke-width=\"0.7\" opacity=\"0.5\"/>"
        );
    }

    /// The file. It has no empty line, so that Markdown takes it as one block.
    pub(crate) fn finish(self) -> String {
        let [width, height] = self.size;
        format!(
            "<svg class=\"figure\" xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" \
             style=\"max-width: {width:.0}px; width: 100%; height: auto\" font-family=\"sans-serif\" font-size=\"13\" \
             role=\"img\" aria-label=\"{title}\">\n<title>{title}</title>\n{}</svg>\n",
            self.body,
            title = self.title
        )
    }
}
