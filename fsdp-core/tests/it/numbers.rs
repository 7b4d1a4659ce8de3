//! Numbers on the command line, however large or small: something is printed, or the number is refused with a remedy.

#![allow(clippy::unwrap_used, reason = "all of this is a test, its helpers too")]

use proptest::prelude::*;

use super::command::fsdp;

/// Whole numbers at the ends of what can be written, and near where sums and products of them overflow.
fn any_whole() -> impl Strategy<Value = String> {
    prop_oneof![
        3 => (1u64..5000).prop_map(|number| number.to_string()),
        2 => (0u32..70, -1i128..2).prop_map(|(power, by)| ((1i128 << power) + by).to_string()),
        1 => proptest::sample::select(vec!["0", "-1", "1e9", "nan", "", "18446744073709551616", "9e15", "1e18"])
            .prop_map(str::to_owned),
    ]
}

fn any_real() -> impl Strategy<Value = String> {
    prop_oneof![
        3 => (1e-3..1e3f64).prop_map(|number| number.to_string()),
        2 => (-320i32..320).prop_map(|power| format!("1e{power}")),
        1 => proptest::sample::select(vec!["0", "-0", "-1", "inf", "nan", "1e999", "5e-324"]).prop_map(str::to_owned),
    ]
}

fn any_size() -> impl Strategy<Value = String> {
    (any_whole(), proptest::sample::select(vec!["", "GB", "TiB"])).prop_map(|(number, unit)| number + unit)
}

const WHOLE: &[&str] = &["gpus", "replicate", "gpus-per-node", "vocabulary", "sequence", "batch", "nvme-disks"];
const REAL: &[&str] = &[
    "alpha-us",
    "bandwidth",
    "node-alpha-us",
    "node-bandwidth",
    "mfu",
    "flops",
    "nvme-read",
    "nvme-write",
    "host-bandwidth",
];
const SIZES: &[&str] = &["device-memory", "activations"];

fn some_of(names: &'static [&'static str], value: BoxedStrategy<String>) -> BoxedStrategy<Vec<String>> {
    let options = proptest::collection::vec((proptest::sample::select(names), value), 0..4);
    // An option comes once.
    let unique = |options: Vec<(&str, String)>| {
        let mut seen = std::collections::BTreeMap::new();
        seen.extend(options);
        seen.into_iter().map(|(name, value)| format!("--{name}={value}")).collect()
    };
    options.prop_map(unique).boxed()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_number_on_the_command_line_overflows_or_hangs(
        model in prop_oneof![
            (any_whole(), any_whole()).prop_map(|(params, units)| vec![format!("--params={params}"), format!("--units={units}")]),
            (any_whole(), any_whole(), any_whole()).prop_map(|(layers, width, heads)| {
                vec![format!("--layers={layers}"), format!("--width={width}"), format!("--heads={heads}")]
            }),
        ],
        whole in some_of(WHOLE, any_whole().boxed()),
        real in some_of(REAL, any_real().boxed()),
        sizes in some_of(SIZES, any_size().boxed()),
        measured in proptest::option::of((any_real(), any_real())),
        simulation in proptest::option::of((any_whole(), any_real(), any_whole(), any_real())),
        offload in any::<bool>(),
    ) {
        let mut arguments = model;
        arguments.extend([whole, real, sizes].concat());
        if !arguments.iter().any(|argument| argument.starts_with("--gpus=")) {
            arguments.push("--gpus=8".to_owned());
        }
        arguments.extend(measured.into_iter().flat_map(|(pass, step)| [format!("--pass-s={pass}"), format!("--optimizer-s={step}")]));
        if offload {
            arguments.push("--offload=optimizer=nvme,gradients=cpu,parameters=nvme:0.5".to_owned());
        }
        match simulation {
            Some((steps, jitter, rank, factor)) => {
                arguments.insert(0, "simulate".to_owned());
                arguments.extend([format!("--steps={steps}"), format!("--jitter={jitter}"), format!("--straggler={rank}:{factor}")]);
            }
            None => arguments.insert(0, "plan".to_owned()),
        }
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let (code, stdout, stderr) = fsdp(&arguments);
        prop_assert!([0, 1, 2].contains(&code), "{arguments:?}: {code}\n{stderr}");
        prop_assert!(!stderr.contains("panicked"), "{arguments:?}: {stderr}");
        prop_assert_eq!(code == 0, !stdout.is_empty());
        prop_assert!(!stdout.contains("NaN") && !stdout.contains("inf "), "{:?}: {}", arguments, stdout);
        if code != 0 {
            prop_assert!(stderr.starts_with("error: ") && stderr.len() > 30, "{arguments:?}: {stderr}");
        }
    }
}

#[test]
fn what_is_too_large_names_the_option_the_value_and_what_is_allowed() {
    let refused = |arguments: &[&str]| {
        let (code, _, stderr) = fsdp(arguments);
        assert!(code != 0, "{arguments:?}");
        stderr
    };
    let text = refused(&["plan", "--params", "1e9", "--gpus", "2000000"]);
    assert!(
        text.contains("'2000000' for '--gpus <N>': `2000000` must be a whole number from 1 to 1,048,576"),
        "{text}"
    );
    let text = refused(&["plan", "--layers", "4096", "--width", "1073741824", "--gpus", "8"]);
    assert!(
        text.contains("--layers 4096, --width 1073741824, ") && text.contains("at most 9.0e15 are counted"),
        "{text}"
    );
    let text = refused(&["simulate", "--params", "1e9", "--gpus", "1000000", "--jitter", "0.1", "--steps", "1000000"]);
    assert!(
        text.contains("1,000,000 steps move the clocks of 1,000,000 ranks") && text.contains("fewer --steps"),
        "{text}"
    );
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("run.toml");
    std::fs::write(&file, "world_size = 2\n[training]\ngradient_accumulation = 1_000_000_000\n").unwrap();
    let text = refused(&["plan", "--params", "1e9", "--config", file.to_str().unwrap()]);
    assert!(text.contains("set `training.gradient_accumulation` to at most 6250"), "{text}");
    std::fs::write(&file, "world_size = 2\nprefetch = { forward = 9223372036854775807 }\n").unwrap();
    assert_eq!(fsdp(&["plan", "--params", "1e9", "--config", file.to_str().unwrap()]).0, 0, "a depth beyond all units");
    let text = refused(&["bench", "--ranks", "1024", "--max-size", "1TB"]);
    assert!(text.contains("--ranks 1024 with --max-size 931.3 GiB take "), "{text}");
}
