//! Small pictures as SVG, to stand inside a page: their colours come from the page's style (`tutorial.css`).

use std::fmt::Write;

/// A picture of a fixed size, in which one unit is a pixel at full width.
pub(crate) struct Svg {
    width: f64,
    height: f64,
    title: &'static str,
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
    pub(crate) fn new(width: f64, height: f64, title: &'static str) -> Self {
        Self { width, height, title, body: String::new() }
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

    pub(crate) fn arrow(&mut self, from: [f64; 2], to: [f64; 2]) {
        self.line(from, to, "fig-line");
        let angle = (to[1] - from[1]).atan2(to[0] - from[0]);
        for turn in [2.6, -2.6] {
            let tip = [to[0] + 7.0 * (angle + turn).cos(), to[1] + 7.0 * (angle + turn).sin()];
            self.line(to, tip, "fig-line");
        }
    }

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

    /// Without an empty line, which would end it inside a page.
    pub(crate) fn finish(self) -> String {
        let Self { width, height, title, body } = self;
        format!(
            "<svg class=\"fig\" viewBox=\"0 0 {width} {height}\" style=\"max-width: {width}px\" role=\"img\" \
             aria-label=\"{title}\" xmlns=\"http://www.w3.org/2000/svg\">\n{body}</svg>\n"
        )
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
