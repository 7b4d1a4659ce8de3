//! Small pictures as SVG, to stand inside a page: their colours come from the page's style (`tutorial.css`).

use std::f64::consts::TAU;
use std::fmt::Write;

/// A picture of a fixed size, in which one unit is a pixel at full width.
pub(crate) struct Svg {
    width: f64,
    height: f64,
    title: String,
    body: String,
}

/// Where a text's place is in it.
#[derive(Clone, Copy)]
pub(crate) enum Anchor {
    Start,
    Middle,
    End,
}

impl Svg {
    /// `title` is read out in place of the picture.
    pub(crate) fn new(width: f64, height: f64, title: &str) -> Self {
        Self { width, height, title: escaped(title), body: String::new() }
    }

    /// A box of the style `class`, which tells `hint` under the pointer.
    pub(crate) fn rect(&mut self, [x, y]: [f64; 2], [width, height]: [f64; 2], class: &str, hint: &str) {
        let title = if hint.is_empty() { String::new() } else { format!("<title>{}</title>", escaped(hint)) };
        let _ = writeln!(
            self.body,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{height:.1}\" class=\"{class}\">{title}</rect>",
            width.max(0.5)
        );
    }

    pub(crate) fn text(&mut self, [x, y]: [f64; 2], anchor: Anchor, class: &str, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let _ = writeln!(
            self.body,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" class=\"{class}\">{}</text>",
            escaped(text)
        );
    }

    pub(crate) fn line(&mut self, [x, y]: [f64; 2], [to_x, to_y]: [f64; 2], class: &str) {
        let _ = writeln!(
            self.body,
            "<line x1=\"{x:.1}\" y1=\"{y:.1}\" x2=\"{to_x:.1}\" y2=\"{to_y:.1}\" class=\"{class}\"></line>"
        );
    }

    /// A box around a name; `at` is its middle.
    pub(crate) fn node(&mut self, [x, y]: [f64; 2], width: f64, name: &str) {
        let (left, top) = (x - width / 2.0, y - 16.0);
        let _ = writeln!(
            self.body,
            "<rect x=\"{left:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"32\" rx=\"8\" class=\"fig-node\"></rect>"
        );
        self.text([x, y + 5.0], Anchor::Middle, "fig-label", name);
    }

    /// A box of the style `class` with what it is, where that fits; `hint` is told under the pointer.
    pub(crate) fn bar(&mut self, [x, y]: [f64; 2], [width, height]: [f64; 2], class: &str, label: &str, hint: &str) {
        self.rect([x, y], [width, height], class, hint);
        if !label.is_empty() && width > 7.0 * label.chars().count() as f64 + 4.0 {
            self.text([x + width / 2.0, y + height / 2.0 + 4.0], Anchor::Middle, "fig-inside", label);
        }
    }

    /// A straight arrow.
    pub(crate) fn arrow(&mut self, from: [f64; 2], to: [f64; 2]) {
        self.bent_arrow(from, to, 0.0, "");
    }

    /// An arrow along a curve, whose middle `bend` moves to the left of its direction; `label` stands there.
    pub(crate) fn bent_arrow(&mut self, [x1, y1]: [f64; 2], [x2, y2]: [f64; 2], bend: f64, label: &str) {
        let (dx, dy) = (x2 - x1, y2 - y1);
        let len = dx.hypot(dy).max(1.0);
        // What pulls the curve; it goes half as far.
        let [mx, my] = [(x1 + x2) / 2.0 + 2.0 * bend * dy / len, (y1 + y2) / 2.0 - 2.0 * bend * dx / len];
        let _ = writeln!(
            self.body,
            "<path d=\"M{x1:.1} {y1:.1} Q{mx:.1} {my:.1} {x2:.1} {y2:.1}\" class=\"fig-line\"></path>"
        );
        let angle = (y2 - my).atan2(x2 - mx);
        let corner = |turn: f64| [x2 - 8.0 * (angle + turn).cos(), y2 - 8.0 * (angle + turn).sin()];
        let [[ax, ay], [bx, by]] = [corner(TAU / 16.0), corner(-TAU / 16.0)];
        let _ = writeln!(
            self.body,
            "<path d=\"M{x2:.1} {y2:.1} L{ax:.1} {ay:.1} L{bx:.1} {by:.1} Z\" class=\"fig-head\"></path>"
        );
        if !label.is_empty() {
            let top = (y1 + y2) / 4.0 + my / 2.0;
            let is_below = bend < 0.0 && dx >= 0.0 || bend > 0.0 && dx < 0.0;
            let at = [(x1 + x2) / 4.0 + mx / 2.0, if is_below { top + 17.0 } else { top - 7.0 }];
            self.text(at, Anchor::Middle, "fig-label", label);
        }
    }

    /// A line through `points`.
    pub(crate) fn curve(&mut self, points: &[[f64; 2]], class: &str) {
        let points: Vec<_> = points.iter().map(|[x, y]| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(self.body, "<polyline points=\"{}\" class=\"{class}\"></polyline>", points.join(" "));
    }

    pub(crate) fn dot(&mut self, [x, y]: [f64; 2], class: &str, hint: &str) {
        let _ = writeln!(
            self.body,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" class=\"{class}\"><title>{}</title></circle>",
            escaped(hint)
        );
    }

    /// Boxes of colour with their meaning, in a row.
    pub(crate) fn legend(&mut self, [mut x, y]: [f64; 2], entries: &[(&str, &str)]) {
        for (class, meaning) in entries {
            self.rect([x, y - 10.0], [12.0, 12.0], class, "");
            self.text([x + 18.0, y], Anchor::Start, "fig-small", meaning);
            x += 34.0 + 6.6 * meaning.chars().count() as f64;
        }
    }

    /// Without an empty line, which would end it inside a page. A phone scrolls it before its text becomes too small to read.
    pub(crate) fn finish(self) -> String {
        let Self { width, height, title, body } = self;
        let least = 0.75 * width;
        format!(
            "<svg class=\"fig\" viewBox=\"0 0 {width} {height}\" style=\"max-width: {width}px; min-width: {least}px\" \
             role=\"img\" aria-label=\"{title}\" xmlns=\"http://www.w3.org/2000/svg\">\n{body}</svg>\n"
        )
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
