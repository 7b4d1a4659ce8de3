//! How the interactive pages look: on a desk and on a phone, on light and dark ground, on paper.

use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::book::{PAGES, address, folder, opened};
use crate::browser::Browser;

/// Where pictures of the pages are left, to be looked at.
fn pictures() -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("pages");
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// The bytes of base64.
fn decoded(text: &str) -> Vec<u8> {
    let value = |letter: u8| match letter {
        b'A'..=b'Z' => letter - b'A',
        b'a'..=b'z' => letter - b'a' + 26,
        b'0'..=b'9' => letter - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let letters: Vec<u8> = text.bytes().filter(|&letter| letter != b'=').collect();
    let bytes = letters.chunks(4).flat_map(|four| {
        let bits =
            four.iter().fold(0u32, |bits, &letter| bits << 6 | u32::from(value(letter))) << (6 * (4 - four.len()));
        bits.to_be_bytes()[1..four.len()].to_vec()
    });
    bytes.collect()
}

/// Takes a picture of the whole page.
pub(crate) fn take_picture(browser: &mut Browser, name: &str) {
    let size = browser.call("Page.getLayoutMetrics", &json!({}))["cssContentSize"].clone();
    let clip = json!({ "x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1 });
    let picture = browser.call("Page.captureScreenshot", &json!({ "captureBeyondViewport": true, "clip": clip }));
    let bytes = decoded(picture["data"].as_str().unwrap());
    assert!(bytes.starts_with(b"\x89PNG") && bytes.len() > 20_000, "{name}: {} bytes", bytes.len());
    fs::write(pictures().join(format!("{name}.png")), bytes).unwrap();
}

/// What of a page lies right of its window, and does not scroll in a place of its own.
pub(crate) const BEYOND: &str = "Array.from(document.querySelectorAll('main *')).filter((of) =>
    !of.closest('.scroll, pre, svg, .table-wrapper') && of.getBoundingClientRect().right > innerWidth + 0.5)
    .map((of) => `${of.localName}.${of.className}`)";

#[test]
fn nothing_is_wider_than_a_phone_or_a_screen() {
    for page in PAGES {
        let mut browser = opened(page);
        for width in [320, 360, 768, 1280] {
            browser.resize(width);
            browser.open(&address(page));
            let lesson = browser.evaluate("document.querySelectorAll('.fsdp-lesson li').length").as_u64().unwrap();
            for _ in 0..lesson {
                let scrolls = browser.evaluate("document.documentElement.scrollWidth > innerWidth");
                assert_eq!(scrolls, false, "{page} scrolls sideways at {width}");
                assert_eq!(browser.evaluate(BEYOND), json!([]), "{page} at {width}");
                browser.evaluate("document.querySelectorAll('.fsdp-lesson .turn button')[1].click()");
            }
        }
    }
}

/// Texts of the widgets with less contrast than 4.5 to 1 (Web Content Accessibility Guidelines 2.1, 1.4.3).
const FAINT: &str = "(() => {
    const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    const over = (colours) => {
        canvas.globalAlpha = 1; canvas.clearRect(0, 0, 1, 1);
        for (const [colour, alpha] of colours) { canvas.globalAlpha = alpha; canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const light = (rgb) => rgb.map((of) => of / 255).map((of) => of <= 0.04045 ? of / 12.92 : ((of + 0.055) / 1.055) ** 2.4)
        .reduce((sum, of, at) => sum + of * [0.2126, 0.7152, 0.0722][at], 0);
    const grounds = (of) => of === null ? [] : [...grounds(of.parentElement), [getComputedStyle(of).backgroundColor, 1]];
    const faint = [];
    let texts = 0;
    for (const of of document.querySelectorAll('.fsdp *, .fsdp-lesson *')) {
        const says = [...of.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim() !== '');
        if (!says || !of.checkVisibility() || of.closest('title, [aria-disabled=true], code, option')) continue;
        texts += 1;
        const style = getComputedStyle(of);
        const isDrawn = of.closest('svg') !== null;
        const ground = grounds(of);
        if (isDrawn) {
            const box = of.getBoundingClientRect();
            const below = [...of.closest('svg').querySelectorAll('rect')].filter((rect) => {
                const area = rect.getBoundingClientRect();
                const [x, y] = [box.left + box.width / 2, box.top + box.height / 2];
                return area.left <= x && x <= area.right && area.top <= y && y <= area.bottom;
            });
            for (const rect of below) {
                const paint = getComputedStyle(rect);
                if (paint.fill !== 'none') ground.push([paint.fill, Number(paint.fillOpacity)]);
            }
        }
        const [one, two] = [light(over([...ground, [isDrawn ? style.fill : style.color, 1]])), light(over(ground))];
        const contrast = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
        if (contrast < 4.5) faint.push(`${of.localName}.${of.getAttribute('class')} ${of.textContent.slice(0, 30)}: ${contrast.toFixed(2)}`);
    }
    return texts < 30 ? `only ${texts} texts are found` : faint;
})()";

#[test]
fn texts_stand_out_in_every_theme() {
    for page in PAGES {
        let mut browser = opened(page);
        for theme in ["light", "rust", "coal", "navy", "ayu"] {
            browser.evaluate(&format!("localStorage.setItem('mdbook-theme', '{theme}')"));
            browser.open(&address(page));
            assert_eq!(browser.evaluate(&format!("document.documentElement.classList.contains('{theme}')")), true);
            assert_eq!(browser.evaluate(FAINT), json!([]), "{page}, {theme}");
        }
    }
}

#[test]
fn the_ground_is_what_the_system_prefers() {
    for page in PAGES {
        let mut browser = opened(page);
        let mut grounds = Vec::new();
        for (scheme, width) in [("light", 1280), ("dark", 1280), ("light", 360), ("dark", 360)] {
            browser.resize(width);
            browser.emulate(scheme, "");
            browser.open(&address(page));
            let ground = browser.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--bg').trim()");
            grounds.push(ground);
            take_picture(&mut browser, &format!("{page}-{width}-{scheme}"));
        }
        assert!(
            grounds[0] == grounds[2] && grounds[1] == grounds[3] && grounds[0] != grounds[1],
            "{page}: {grounds:?}"
        );
    }
}

#[test]
fn on_paper_there_is_a_picture_with_its_settings_and_nothing_to_press() {
    for page in PAGES {
        let mut browser = opened(page);
        // As somebody prints who reads on dark ground.
        browser.emulate("dark", "");
        browser.open(&address(page));
        browser.emulate("dark", "print");
        let visible = |browser: &mut Browser, what: &str| -> Value {
            let all = format!("Array.from(document.querySelectorAll('{what}'))");
            browser.evaluate(&format!("{all}.filter((of) => of.checkVisibility()).length"))
        };
        assert_eq!(visible(&mut browser, ".fsdp input, .fsdp select, .fsdp button"), 0, "{page}");
        assert!(visible(&mut browser, ".fsdp svg").as_u64() >= Some(1), "{page}");
        assert_eq!(visible(&mut browser, ".fsdp .settings"), 1, "{page}");
        let settings = browser.evaluate("document.querySelector('.fsdp .settings').textContent");
        assert!(settings.as_str().unwrap().matches(" · ").count() >= 5, "{page}: {settings}");
        let num_items = browser.evaluate("document.querySelectorAll('.fsdp-lesson li').length");
        assert_eq!(visible(&mut browser, ".fsdp-lesson li"), num_items, "{page}: the whole lesson");
        assert_eq!(browser.evaluate(FAINT), json!([]), "{page}");
        let pdf = browser.call("Page.printToPDF", &json!({ "printBackground": false }));
        let pdf = decoded(pdf["data"].as_str().unwrap());
        assert!(pdf.starts_with(b"%PDF"), "{page}");
        fs::write(pictures().join(format!("{page}.pdf")), pdf).unwrap();
    }
}

#[test]
fn the_whole_book_on_one_page_has_the_pictures_too() {
    let mut browser = opened("memory");
    browser.emulate("light", "print");
    browser.open(&format!("file://{}/print.html", folder().display()));
    for page in PAGES {
        assert_eq!(browser.evaluate(&format!("document.querySelector('#fsdp-{page} svg') !== null")), true, "{page}");
    }
    assert_eq!(browser.complaints(), [""; 0]);
}

#[test]
fn pages_load_in_under_a_second_without_a_complaint_or_a_request() {
    for page in PAGES {
        let mut browser = opened(page);
        // The fastest of some: other programs on the machine make a page slow, and never fast.
        let mut least_ms = f64::INFINITY;
        for _ in 0..5 {
            browser.open(&address(page));
            let drawn = browser.evaluate("performance.getEntriesByName('fsdp-drawn')[0].startTime").as_f64().unwrap();
            let loaded = browser.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd");
            least_ms = least_ms.min(drawn.max(loaded.as_f64().unwrap()));
            browser.evaluate("document.querySelectorAll('button[data-set]').forEach((button) => button.click())");
            assert_eq!(browser.complaints(), [""; 0], "{page}");
        }
        println!("{page}: loaded and drawn after {least_ms:.0} ms");
        assert!(least_ms < 1000.0, "{page} takes {least_ms} ms");
    }
}
