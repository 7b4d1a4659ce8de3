//! The page of error messages, written from errors that are really provoked, or built where provoking takes long.

use std::time::Duration;

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{LambConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, Tensor};
use fsdp_burn::{CommError, Config, Error, FieldRule, Rank, Sharded, Stage, WrapPolicy, launch};
use fsdp_core::{Issued, Mesh, OpKind, OpTag, ParamSpec, Phase, Plan};

use crate::output::assert_shown;

/// Columns of a shown message.
const COLUMNS: usize = 96;

#[derive(Module, Debug, Sharded)]
struct Model {
    #[shard(unit)]
    head: Linear,
}

#[derive(Module, Debug, Sharded)]
struct Offloaded {
    #[shard(unit, offload = "nvme")]
    head: Linear,
}

#[derive(Module, Debug)]
struct Tied {
    table: Param<Tensor<2>>,
    head: Param<Tensor<2>>,
}

impl Sharded for Tied {
    fn wrap_policy() -> WrapPolicy {
        WrapPolicy::new().field("table", FieldRule::unit().replicate())
    }
}

fn model(device: &Device) -> Model {
    Model { head: LinearConfig::new(4, 4).init(device) }
}

fn config(text: &str) -> String {
    Config::from_toml(text, "run.toml").unwrap_err().to_string()
}

fn on_two_ranks<F>(program: F) -> String
where
    F: Fn(&Rank, &Device) -> Result<(), Error> + Send + Sync + 'static,
{
    let config = Config { world_size: 2, timeout_s: 20.0, ..Config::default() };
    let message = launch(&config, move |rank| program(&rank, &rank.device())).unwrap_err().to_string();
    // Where all ranks fail alike, either may be the first.
    let after_rank = ["rank 0: ", "rank 1: "].into_iter().find_map(|rank| message.strip_prefix(rank));
    after_rank.unwrap_or(&message).to_owned()
}

fn optimizer(make: fn() -> ModuleOptimizer) -> String {
    on_two_ranks(move |rank, device| {
        let mut model = rank.shard(model(device))?;
        let mut optimizer = rank.optimizer(make())?;
        let gradients = model.backward(model.head.forward(Tensor::<2>::ones([1, 4], device)).sum())?;
        optimizer.step(0.1, &mut model, gradients).map(|_| ())
    })
}

fn spec(rule: FieldRule, shape: &[usize]) -> String {
    let path = vec!["head".into(), "weight".into()];
    let param = ParamSpec { path, shape: shape.to_vec(), trainable: true, ..ParamSpec::default() };
    let policy = WrapPolicy::new().field("head", rule);
    Plan::new(&policy, &[param], &Mesh::one_dim(4), Stage::Parameters).unwrap_err().to_string()
}

fn warning(policy: WrapPolicy, params: &[(&str, usize)]) -> String {
    let spec = |&(path, len): &(&str, usize)| ParamSpec {
        path: path.split('.').map(str::to_owned).collect(),
        shape: vec![len],
        trainable: true,
        held_by_op: true,
        ..ParamSpec::default()
    };
    let specs: Vec<_> = params.iter().map(spec).collect();
    let plan = Plan::new(&policy, &specs, &Mesh::one_dim(2), Stage::Parameters).unwrap();
    plan.warnings()[0].to_string()
}

/// At most [`COLUMNS`] columns, broken at blanks.
fn wrapped(message: &str) -> String {
    let mut lines = vec![String::new()];
    for word in message.split_whitespace() {
        let last = lines.len() - 1;
        match lines[last].is_empty() {
            true => lines[last] += word,
            false if lines[last].len() + 1 + word.len() <= COLUMNS => lines[last] += &format!(" {word}"),
            false => lines.push(word.to_owned()),
        }
    }
    lines.join("\n")
}

fn section(title: &str, messages: &[(&str, String)]) -> String {
    let message = |(what, text): &(&str, String)| format!("\n{what}\n\n```text\n{}\n```\n", wrapped(text));
    format!("\n## {title}\n{}", messages.iter().map(message).collect::<String>())
}

fn configuration() -> String {
    section(
        "The configuration",
        &[
            ("A key that does not exist:", config("wordl_size = 2\n")),
            ("A key of another table:", config("gradient_clip_norm = 1.0\n")),
            ("A value of another type:", config("world_size = 4.0\n")),
            ("A value out of range:", config("stage = 4\n")),
            ("A name that is none of the choices:", config("[training]\nnon_finite = \"crash\"\n")),
            ("A mesh for another number of ranks:", config("world_size = 4\nmesh = { replicate = 2, shard = 3 }\n")),
            ("A file that is neither TOML nor JSON:", Config::load("run.yaml").unwrap_err().to_string()),
        ],
    )
}

fn shards() -> String {
    let tied = on_two_ranks(|rank, device| {
        let table = Param::from_tensor(Tensor::<2>::ones([4, 4], device));
        rank.shard(Tied { head: table.clone(), table }).map(|_| ())
    });
    let offloaded =
        on_two_ranks(|rank, device| rank.shard(Offloaded { head: LinearConfig::new(4, 4).init(device) }).map(|_| ()));
    let untracked = on_two_ranks(|rank, _| rank.shard(model(&Device::flex())).map(|_| ()));
    section(
        "Sharding a model",
        &[
            ("A spec with more entries than the parameter has dimensions:", {
                spec(FieldRule::unit().spec([None, Some("shard")]), &[10])
            }),
            ("A spec with an axis that no mesh has:", spec(FieldRule::unit().spec([Some("tensor")]), &[10, 4])),
            ("Two fields with one parameter that only one of them replicates:", tied),
            ("A unit on a disk, and no disk:", offloaded),
            ("A model on a device without autodiff:", untracked),
        ],
    )
}

fn warnings() -> String {
    let blocks = WrapPolicy::new().field("blocks", FieldRule::units());
    let table = WrapPolicy::new().field("tokens", FieldRule::unit());
    section(
        "Warnings about the plan",
        &[
            ("No units:", warning(WrapPolicy::new(), &[("blocks.0", 9)])),
            ("A rule that finds nothing:", warning(blocks.clone(), &[("layers.0", 9)])),
            ("One unit with most of the model:", warning(blocks, &[("blocks.0", 9), ("norm", 1)])),
            ("Burn's embedding with a large table:", warning(table, &[("tokens.weight", 32_000 * 512)])),
        ],
    )
}

fn training() -> String {
    let loss = on_two_ranks(|rank, device| {
        let model = rank.shard(model(device))?;
        let loss = model.head.forward(Tensor::<2>::ones([1, 4], device)).sum();
        if rank.is_main() {
            let _ = loss.backward();
        }
        Ok(())
    });
    let clipping = optimizer(|| {
        let norm = burn::grad_clipping::GradientClippingConfig::Norm(1.0);
        SgdConfig::new().with_gradient_clipping(Some(norm)).init()
    });
    section(
        "Training",
        &[
            ("Burn's own backward:", loss),
            ("An optimizer that looks at whole tensors:", optimizer(|| LambConfig::new().init())),
            ("Burn's clipping by norm:", clipping),
            ("A norm that is not finite:", Error::NonFinite { step: 12, norm: f64::INFINITY }.to_string()),
        ],
    )
}

fn ranks() -> String {
    let tag = |unit: &str| OpTag::new(12, Phase::Forward, unit);
    let issued = |rank, unit| Issued { rank, kind: OpKind::AllGather, tag: tag(unit), detail: String::new() };
    let timeout = CommError::Timeout {
        rank: 0,
        kind: OpKind::AllGather,
        tag: tag("blocks.3"),
        waited: Duration::from_secs(300),
        missing: vec![2],
    };
    let left = CommError::Left { rank: 0, kind: OpKind::AllGather, tag: tag("tokens"), left: vec![2] };
    let mismatch = CommError::Mismatch {
        what: "tag",
        first: Box::new(issued(0, "blocks.3")),
        second: Box::new(issued(1, "blocks.4")),
    };
    let stuck = Error::RankStuck { rank: 2, waited_s: 300.0, cause: "rank 1 panicked: index out of bounds".into() };
    let panicked = Error::RankPanicked { rank: 1, message: "index out of bounds".into() };
    section(
        "Ranks that fail",
        &[
            ("A rank that panicked:", panicked.to_string()),
            ("A rank that did not come to a collective:", timeout.to_string()),
            ("A rank that has made fewer steps than the others:", left.to_string()),
            ("Ranks that did different things:", mismatch.to_string()),
            ("A rank that does not end:", stuck.to_string()),
        ],
    )
}

#[test]
fn the_page_of_error_messages_is_current() {
    let intro = "# Error messages\n\n\
        <!-- Written by `UPDATE_BOOK=1 cargo book-test` from `listings/errors.rs`; do not edit. -->\n\n\
        Errors are enums with fields (`fsdp_burn::Error`, `fsdp_core::ConfigError`, `PlanError`, `CommError`), and their\n\
        messages name the place and the remedy. These are the ones that users meet, as they are printed, with lines\n\
        broken to fit the page. An error that `launch` returns begins with the rank that failed first, as in\n\
        `rank 1: the data set is empty`.\n\n\
        Mistakes in `#[shard(...)]` attributes are compiler errors at the word that is wrong.\n";
    let page = [intro.to_owned(), configuration(), shards(), warnings(), training(), ranks()].concat();
    assert_shown("src/reference/errors.md", &page);
}
