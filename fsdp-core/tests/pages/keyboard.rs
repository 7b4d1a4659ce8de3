//! The interactive pages without a mouse, and for those who do not see them.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::book::{PAGES, address, opened};
use crate::browser::Browser;

/// What has the focus: its kind and its name.
fn focused(browser: &mut Browser) -> (String, String) {
    let told = browser.evaluate(
        "(() => { const of = document.activeElement;
            const name = of.getAttribute('aria-label') ?? of.labels?.[0]?.textContent ?? of.textContent;
            const group = of.type === 'radio' ? of.closest('fieldset').querySelector('legend').textContent : '';
            return [of.type === undefined ? of.localName : of.type, group === '' ? name : group]; })()",
    );
    let text = |at: usize| told[at].as_str().unwrap().trim().to_owned();
    (text(0), text(1))
}

fn state(browser: &mut Browser, page: &str) -> String {
    browser.evaluate(&format!("fsdp.widgets.{page}.get()")).as_str().unwrap().to_owned()
}

/// Presses a key, and asserts that it has changed the settings.
fn assert_changes(browser: &mut Browser, page: &str, key: &str, what: &str) {
    let before = state(browser, page);
    browser.press(key);
    let after = state(browser, page);
    assert!(before != after, "{page}: {key} on {what} changes nothing of {before}");
}

#[test]
fn every_control_is_reached_and_moved_with_the_keyboard() {
    for page in PAGES {
        let mut browser = opened(page);
        // The lesson comes first, from which the keyboard goes on to the picture and its controls.
        browser.evaluate("document.querySelector('.fsdp-lesson .turn button').focus()");
        let mut seen = BTreeSet::new();
        loop {
            let (kind, name) = focused(&mut browser);
            if browser.evaluate("document.activeElement.closest('.fsdp, .fsdp-lesson') === null") == true {
                break;
            }
            assert!(seen.insert((kind.clone(), name.clone())), "{page}: Tab comes to {kind} {name} again");
            assert!(!name.is_empty(), "{page}: a {kind} has no name");
            let is_setting = browser.evaluate("document.activeElement.closest('.controls') !== null") == true;
            match kind.as_str() {
                "range" if is_setting => {
                    let is_last = browser.evaluate("document.activeElement.value === document.activeElement.max");
                    assert_changes(&mut browser, page, if is_last == true { "ArrowLeft" } else { "ArrowRight" }, &name);
                }
                "radio" => assert_changes(&mut browser, page, "ArrowDown", &name),
                "checkbox" => assert_changes(&mut browser, page, "Space", &name),
                "select-one" => assert_changes(&mut browser, page, "ArrowDown", &name),
                "text" => {
                    let text = browser.evaluate("document.activeElement.value");
                    let before = state(&mut browser, page);
                    for (typed, is_invalid) in [("x", "true"), (text.as_str().unwrap(), "false")] {
                        browser.evaluate("document.activeElement.select()");
                        browser.call("Input.insertText", &json!({ "text": typed }));
                        let told = browser.evaluate("document.activeElement.getAttribute('aria-invalid')");
                        assert_eq!(told, is_invalid, "{page}: {name} is {typed}");
                        assert_eq!(state(&mut browser, page), before, "{page}: {name} is {typed}");
                    }
                }
                _ => {}
            }
            browser.press("Tab");
        }
        // The radios of a group are one stop, and a step has a slider for its time.
        let stops = browser.evaluate(
            "(() => { const fields = [...document.querySelectorAll('.fsdp input, .fsdp select')];
                return new Set(fields.map((of) => of.type === 'radio' ? of.name : of)).size; })()",
        );
        let kinds = ["range", "radio", "checkbox", "select-one", "text"];
        let found = seen.iter().filter(|(kind, _)| kinds.contains(&kind.as_str())).count();
        assert_eq!(stops, found, "{page}: {seen:?}");
        let here = browser.evaluate("location.href");
        assert_eq!(here, address(page), "the keys that move controls do not turn the book's pages");
    }
}

#[test]
fn the_lesson_goes_on_and_back_and_sets_what_it_tells_of() {
    for page in PAGES {
        let mut browser = opened(page);
        let current = |browser: &mut Browser| {
            let shown =
                "Array.from(document.querySelectorAll('.fsdp-lesson li')).filter((item) => item.checkVisibility())";
            let items = browser.evaluate(&format!("{shown}.map((item) => item.textContent)"));
            assert_eq!(items.as_array().unwrap().len(), 1, "{page}: one is shown at a time");
            items[0].as_str().unwrap().to_owned()
        };
        let num_items = browser.evaluate("document.querySelectorAll('.fsdp-lesson li').length").as_u64().unwrap();
        assert!(num_items >= 5);
        let (mut texts, mut states) = (vec![current(&mut browser)], vec![state(&mut browser, page)]);
        browser.evaluate("document.querySelectorAll('.fsdp-lesson .turn button')[1].focus()");
        for _ in 1..num_items {
            browser.press("Enter");
            texts.push(current(&mut browser));
            states.push(state(&mut browser, page));
            browser.evaluate("document.querySelectorAll('.current button').forEach((button) => button.click())");
        }
        browser.press("Enter");
        assert_eq!(current(&mut browser), *texts.last().unwrap(), "{page}: the last one has no next");
        for pair in texts.windows(2).zip(states.windows(2)) {
            assert!(pair.0[0] != pair.0[1] && pair.1[0] != pair.1[1], "{page}: {pair:?}");
        }
        // Nothing is set that there is not, and what an item begins with does not depend on what was tried before.
        let sets = browser.evaluate(
            "Array.from(document.querySelectorAll('button[data-set]')).flatMap((button) => {
                const all = [...new URLSearchParams(fsdp.widgets[button.dataset.fsdp].get()).keys()];
                return [...new URLSearchParams(button.dataset.set).keys()].filter((key) => !all.includes(key)); })",
        );
        assert_eq!(sets, json!([]), "{page}");
        browser.evaluate("document.querySelectorAll('.fsdp-lesson .turn button')[0].focus()");
        for (text, expected) in texts.iter().zip(&states).rev().skip(1) {
            browser.press("Enter");
            assert_eq!((current(&mut browser), state(&mut browser, page)), (text.clone(), expected.clone()), "{page}");
        }
    }
}

#[test]
fn a_step_is_played_and_scrubbed_with_the_keyboard() {
    let mut browser = opened("step");
    let now = "document.querySelector('#fsdp-step .now').textContent";
    browser.evaluate("document.querySelector('.transport input').focus()");
    let before = browser.evaluate(now);
    for _ in 0..150 {
        browser.press("ArrowRight");
    }
    let after = browser.evaluate(now);
    assert!(before != after, "{before}");
    let line = "document.querySelector('.playhead').getAttribute('x1')";
    let place = browser.evaluate(line);
    browser.evaluate("document.querySelector('.transport button').focus()");
    browser.press("Space");
    browser.until(&format!("{line} !== {place}"));
    assert_eq!(browser.evaluate("document.activeElement.textContent"), "Pause");
    browser.press("Space");
    assert_eq!(browser.evaluate("document.activeElement.textContent"), "Play");
    let told = browser.evaluate("document.querySelector('.transport input').getAttribute('aria-valuetext')");
    assert!(told.as_str().unwrap().contains(" of "), "{told}");
}

#[test]
fn everything_that_can_be_used_has_a_name_and_every_picture_a_text() {
    for page in PAGES {
        let mut browser = opened(page);
        browser.call("Accessibility.enable", &json!({}));
        let tree = browser.call("Accessibility.getFullAXTree", &json!({}));
        let mut used = 0;
        for node in tree["nodes"].as_array().unwrap().iter().filter(|node| node["ignored"] != true) {
            let role = node["role"]["value"].as_str().unwrap_or_default();
            let name = node["name"]["value"].as_str().unwrap_or_default();
            let needs_name = ["slider", "textbox", "radio", "checkbox", "combobox", "button", "region", "form"];
            if needs_name.contains(&role) {
                assert!(!name.trim().is_empty(), "{page}: a {role} has no name: {node}");
                used += 1;
            }
        }
        assert!(used > 15, "{page}: {used}");
        let texts = browser.evaluate(
            "[...document.querySelectorAll('.fsdp fieldset legend')].map((legend) => legend.textContent)
                .concat([...document.querySelectorAll('.fsdp svg')].map((picture) => picture.getAttribute('aria-label')))",
        );
        let is_told = |text: &Value| text.as_str().is_some_and(|text| !text.is_empty());
        assert!(texts.as_array().unwrap().iter().all(is_told), "{page}: {texts}");
    }
}
