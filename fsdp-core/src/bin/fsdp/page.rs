//! The picture of a plan: one HTML file without anything from elsewhere.

use std::fmt::Write;

use fsdp_core::{Forecast, SpanKind, StageForecast, TraceStream, grouped, human_bytes};

use crate::machine::Setting;
use crate::plan::{is_offloading, sentence, tokens_per_s};
use crate::rate::seconds;

/// Pixels of the pictures.
const WIDTH: f64 = 960.0;
/// Where bars begin, right of the labels.
const LEFT: f64 = 90.0;

const STYLE: &str = "\
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 2em; }
table { border-collapse: collapse; } td, th { padding: 0.15em 0.8em; text-align: right; }
th { font-weight: 600; border-bottom: 1px solid #8888; } td:first-child, th:first-child { text-align: left; }
.setting td { text-align: left; vertical-align: top; } .setting td:first-child { opacity: 0.7; }
svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
.advice { padding: 0.6em 1em; border-left: 4px solid #3b7dd8; }
.key { display: inline-block; margin-right: 1.2em; } .key i { display: inline-block; width: 0.9em; height: 0.9em;
margin-right: 0.4em; vertical-align: -0.1em; }
.scroll { overflow-x: auto; }
";

/// What memory holds, with a colour each.
const PARTS: [(&str, &str); 7] = [
    ("parameters", "#3b7dd8"),
    ("optimizer state", "#7a55c7"),
    ("gradients", "#d8843b"),
    ("gathered units", "#3ba68c"),
    ("being reduced", "#c9a227"),
    ("activations", "#c25b78"),
    ("passing through", "#6f8f2f"),
];

/// What time is spent on, with a colour each.
const KINDS: [(SpanKind, &str); 9] = [
    (SpanKind::Forward, "#3b7dd8"),
    (SpanKind::Backward, "#7a55c7"),
    (SpanKind::Step, "#5f6b7a"),
    (SpanKind::Gather, "#3ba68c"),
    (SpanKind::Reduce, "#d8843b"),
    (SpanKind::Publish, "#c9a227"),
    (SpanKind::Wait, "#d6455d"),
    (SpanKind::Read, "#6f8f2f"),
    (SpanKind::Write, "#a86f32"),
];

pub(crate) fn html(setting: &Setting, forecast: &Forecast) -> String {
    let mut page = String::new();
    let advice = escaped(&sentence(&forecast.advice.to_string()));
    page += &format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>fsdp plan</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n<h1>What each stage needs and takes</h1>\n\
         <p class=\"advice\">{advice}</p>\n<div class=\"scroll\"><table class=\"setting\">\n"
    );
    for (word, told) in &setting.told {
        page += &format!("<tr><td>{word}</td><td>{}</td></tr>\n", escaped(told));
    }
    page += "</table></div>\n<h2>Memory of a rank</h2>\n";
    let offloads = is_offloading(forecast);
    let parts = PARTS.iter().filter(|(name, _)| offloads || *name != "passing through");
    page += &keys(parts.map(|&(name, colour)| (name, colour)));
    page += &bars(forecast);
    if setting.job.activation_bytes.is_none() {
        page += "<p>Activations are not known, and left out.</p>\n";
    }
    page += "<h2>A step of rank 0</h2>\n";
    let kinds = KINDS.iter().filter(|(kind, _)| offloads || !matches!(kind, SpanKind::Read | SpanKind::Write));
    page += &keys(kinds.map(|&(kind, colour)| (kind.name(), colour)));
    page += &timelines(setting, forecast);
    page += &numbers(setting, forecast);
    page + "</body>\n</html>\n"
}

fn keys<'a>(entries: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let mut text = "<p>".to_owned();
    for (name, colour) in entries {
        text += &format!("<span class=\"key\"><i style=\"background:{colour}\"></i>{name}</span>");
    }
    text + "</p>\n"
}

/// One bar for each stage, and a line where the device ends.
fn bars(forecast: &Forecast) -> String {
    let parts = |of: &StageForecast| {
        let held = of.memory;
        [
            held.parameter_bytes,
            held.optimizer_bytes,
            held.gradient_bytes,
            held.gathered_bytes,
            held.in_flight_bytes,
            held.activation_bytes.unwrap_or(0),
            held.tier_bytes,
        ]
    };
    let sums = forecast.stages.iter().map(|of| parts(of).iter().sum::<u64>());
    let most = sums.chain(forecast.device_bytes).max().unwrap_or(1).max(1) as f64 * 1.02;
    let pixels = |bytes: u64| bytes as f64 / most * (WIDTH - LEFT);
    let height = 36 * forecast.stages.len() + 24;
    let mut svg = format!("<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"memory by stage\">\n");
    for (row, of) in forecast.stages.iter().enumerate() {
        let y = 20 + 36 * row;
        let _ = writeln!(svg, "<text x=\"0\" y=\"{}\">stage {}</text>", y + 17, of.stage.number());
        let mut x = LEFT;
        for ((name, colour), bytes) in PARTS.iter().zip(parts(of)).filter(|(_, bytes)| *bytes > 0) {
            let width = pixels(bytes);
            let _ = writeln!(
                svg,
                "<rect class=\"part\" x=\"{x:.2}\" y=\"{y}\" width=\"{width:.2}\" height=\"26\" fill=\"{colour}\">\
                 <title>{name}: {}</title></rect>",
                human_bytes(bytes)
            );
            x += width;
        }
    }
    if let Some(bytes) = forecast.device_bytes {
        let x = LEFT + pixels(bytes);
        let _ = writeln!(
            svg,
            "<line class=\"device\" x1=\"{x:.2}\" x2=\"{x:.2}\" y1=\"14\" y2=\"{height}\" stroke=\"currentColor\" \
             stroke-dasharray=\"4 3\"/>\n<text x=\"{x:.2}\" y=\"10\" text-anchor=\"end\">a device: {}</text>",
            human_bytes(bytes)
        );
    }
    svg + "</svg>\n<p>A bar shows all parts side by side. They are not all held at one moment: gradients are complete \
           when activations are gone, so the peak in the table below is less than the bar.</p>\n"
}

/// Rows for each stage: computation, gathers, reductions, and tiers where there are any, on one scale of time.
fn timelines(setting: &Setting, forecast: &Forecast) -> String {
    let has_row = |stream: &TraceStream| *stream != TraceStream::Tier || is_offloading(forecast);
    let rows: Vec<TraceStream> = TraceStream::ALL.into_iter().filter(has_row).collect();
    let height = 22 * rows.len();
    let longest = forecast.stages.iter().map(|of| of.report.step_s).fold(f64::MIN_POSITIVE, f64::max) * 1.01;
    let pixels = |seconds: f64| seconds / longest * (WIDTH - LEFT);
    let mut text = String::new();
    for of in &forecast.stages {
        let step_s = of.report.step_s;
        let _ = writeln!(
            text,
            "<p>Stage {}: {} a step, of which {} the rank stands still.</p>\n\
             <svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"a step at stage {}\">",
            of.stage.number(),
            seconds(step_s),
            seconds(of.report.exposed_s),
            of.stage.number()
        );
        for (row, &stream) in rows.iter().enumerate() {
            let y = 22 * row;
            let _ = writeln!(text, "<text x=\"0\" y=\"{}\">{}</text>", y + 14, stream.name());
            for span in of.report.spans.iter().filter(|span| span.stream == stream && span.end_s > 0.0) {
                // What the step before has begun.
                let start_s = span.start_s.max(0.0);
                let colour = KINDS.iter().find(|(kind, _)| *kind == span.kind).map_or("#888", |&(_, colour)| colour);
                let unit = span.unit.and_then(|unit| setting.job.shape.units.get(unit));
                let name = unit.map_or("gradient norm", |unit| unit.name.as_str());
                let _ = writeln!(
                    text,
                    "<rect class=\"span\" x=\"{:.2}\" y=\"{y}\" width=\"{:.2}\" height=\"18\" fill=\"{colour}\">\
                     <title>{} {}: {}</title></rect>",
                    LEFT + pixels(start_s),
                    pixels(span.end_s - start_s).max(0.1),
                    span.kind.name(),
                    escaped(name),
                    seconds(span.end_s - span.start_s)
                );
            }
        }
        text += "</svg>\n";
    }
    text
}

fn numbers(setting: &Setting, forecast: &Forecast) -> String {
    let mut text = "<h2>The numbers</h2>\n<div class=\"scroll\"><table>\n<tr>".to_owned();
    let offloads = is_offloading(forecast);
    let mut heads = vec!["stage", "state", "peak", "fits", "N_min", "sent", "computes", "exposed", "step", "tokens/s"];
    if offloads {
        heads.extend(["in host memory", "on disk", "moved", "waits for it"]);
    }
    for head in heads {
        let _ = write!(text, "<th>{head}</th>");
    }
    text += "</tr>\n";
    for of in &forecast.stages {
        let mut cells = vec![
            of.stage.number().to_string(),
            human_bytes(of.memory.state_bytes()),
            human_bytes(of.memory.peak_or_known_bytes()),
            of.fits.map_or("?", |fits| if fits { "yes" } else { "no" }).to_owned(),
            of.min_ranks.map_or("-".into(), |ranks| ranks.to_string()),
            human_bytes(of.report.sent_bytes),
            seconds(of.report.compute_s),
            seconds(of.report.exposed_s),
            seconds(of.report.step_s),
            grouped(tokens_per_s(setting, of) as u64),
        ];
        if offloads {
            cells.extend([of.tiers.host, of.tiers.nvme, of.report.moved.total_bytes()].map(human_bytes));
            cells.push(seconds(of.report.tier_wait_s));
        }
        let cells: String = cells.iter().map(|cell| format!("<td>{cell}</td>")).collect();
        let _ = writeln!(text, "<tr>{cells}</tr>");
    }
    text + "</table></div>\n"
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
