//! How all pages of the book look: that they fit a phone, and that what is written in a figure can be read.

use serde_json::json;

use crate::book::{folder, pages};
use crate::browser::Browser;
use crate::looks::{BEYOND, take_picture};

/// Labels of figures that cover each other, or are cut off at a border.
const UNREADABLE: &str = "Array.from(document.querySelectorAll('svg.fig')).flatMap((svg) => {
    const [width, height] = [svg.viewBox.baseVal.width, svg.viewBox.baseVal.height];
    // A box is as high as its line; what is written is less.
    const labels = Array.from(svg.querySelectorAll('text')).map((text) => {
        const box = text.getBBox();
        return { text: text.textContent, left: box.x, right: box.x + box.width, top: box.y + 2, bottom: box.y + box.height - 2 };
    });
    const cut = labels.filter((of) => of.left < 0 || of.right > width || of.top < 0 || of.bottom > height);
    const pairs = labels.flatMap((one, index) => labels.slice(index + 1).map((two) => [one, two]));
    const covered = pairs.filter(([one, two]) =>
        Math.min(one.right, two.right) > Math.max(one.left, two.left)
        && Math.min(one.bottom, two.bottom) > Math.max(one.top, two.top));
    const title = svg.getAttribute('aria-label');
    return [
        ...cut.map((of) => `${title}: '${of.text}' is cut off`),
        ...covered.map(([one, two]) => `${title}: '${one.text}' and '${two.text}' cover each other`),
    ];
})";

#[test]
fn every_page_fits_a_phone_and_its_figures_can_be_read() {
    let mut browser = Browser::start();
    let mut problems = Vec::new();
    let mut num_figures = 0;
    for page in pages() {
        for (width, scheme) in [(1280, "light"), (360, "dark")] {
            browser.resize(width);
            browser.emulate(scheme, "");
            browser.open(&format!("file://{}/{page}.html", folder().display()));
            let figures = browser.evaluate("document.querySelectorAll('svg.fig').length").as_u64().unwrap();
            if figures > 0 {
                take_picture(&mut browser, &format!("{}-{width}-{scheme}", page.replace('/', "-")));
            }
            num_figures += figures;
            let mut note = |what: String| problems.push(format!("{page} at {width}: {what}"));
            if browser.evaluate("document.documentElement.scrollWidth > innerWidth") == true {
                note(format!("scrolls sideways, for {}", browser.evaluate(BEYOND)));
            }
            match browser.evaluate(UNREADABLE) {
                none if none == json!([]) => {}
                labels => note(labels.to_string()),
            }
            let complaints = browser.complaints();
            if !complaints.is_empty() {
                note(complaints.join(", "));
            }
        }
    }
    assert!(problems.is_empty(), "\n{}\n", problems.join("\n"));
    assert!(num_figures > 30, "the figures are not found any more");
}
