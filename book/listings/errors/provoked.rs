//! Error messages of runs and configurations that really fail.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{LambConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, Tensor};
use fsdp_burn::{Config, Error, FieldRule, Rank, Sharded, Stage, WrapPolicy, launch};
use fsdp_core::{Axis, Mesh, MeshError, ParamSpec, PartitionSpec, Plan};

use super::Example;

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

fn mesh(axes: &[(Axis, usize)]) -> String {
    Mesh::new(axes.iter().copied()).unwrap_err().to_string()
}

fn planned(policy: WrapPolicy, params: &[(&str, usize)]) -> Result<Plan, fsdp_core::PlanError> {
    let spec = |&(path, len): &(&str, usize)| ParamSpec {
        path: path.split('.').map(str::to_owned).collect(),
        shape: vec![len],
        trainable: true,
        held_by_op: true,
        ..ParamSpec::default()
    };
    let specs: Vec<_> = params.iter().map(spec).collect();
    Plan::new(&policy, &specs, &Mesh::one_dim(2), Stage::Parameters)
}

fn warning(policy: WrapPolicy, params: &[(&str, usize)]) -> String {
    planned(policy, params).unwrap().warnings()[0].to_string()
}

fn configuration() -> Vec<Example> {
    vec![
        Example::new("ConfigError::UnknownKey", "A slip in a name", config("wordl_size = 2\n")),
        Example::new("ConfigError::UnknownKey", "In the wrong table, and misspelt", config("gradient_clip = 1.0\n")),
        Example::new("ConfigError::MisplacedKey", "", config("gradient_clip_norm = 1.0\n")),
        Example::new("ConfigError::WrongType", "", config("world_size = 4.0\n")),
        Example::new("ConfigError::OutOfRange", "", config("stage = 4\n")),
        Example::new("ConfigError::UnknownName", "", config("[training]\nnon_finite = \"crash\"\n")),
        Example::new("ConfigError::MeshProduct", "", config("world_size = 4\nmesh = { replicate = 2, shard = 3 }\n")),
        Example::new("ConfigError::InvalidMesh", "", config("world_size = 4\nmesh = {}\n")),
        Example::new("ConfigError::Syntax", "", config("stage 3\n")),
        Example::new("ConfigError::UnknownFormat", "", Config::load("run.yaml").unwrap_err().to_string()),
        Example::new("ConfigError::Read", "", Config::load("no-such-run.toml").unwrap_err().to_string()),
        Example::new("ConfigError::Needs", "A tier without a place", config("[offload]\noptimizer = \"nvme\"\n")),
        Example::new("ConfigError::Needs", "A key that a stage does not have", {
            config("stage = 2\n[offload]\nparameters = \"nvme\"\nnvme_path = \"/nvme/run1\"\n")
        }),
        Example::new("ConfigError::Conflict", "", {
            config("[training]\ngradient_clip_norm = 1.0\ngradient_clip_value = 0.5\n")
        }),
    ]
}

fn meshes() -> Vec<Example> {
    vec![
        Example::new("MeshError::Empty", "", mesh(&[])),
        Example::new("MeshError::ZeroSize", "", mesh(&[(Axis::Shard, 0)])),
        Example::new("MeshError::RepeatedAxis", "", mesh(&[(Axis::Shard, 2), (Axis::Shard, 2)])),
        Example::new("MeshError::TooLarge", "", mesh(&[(Axis::Replicate, usize::MAX), (Axis::Shard, 2)])),
        Example::new("MeshError::UnknownAxis", "", MeshError::UnknownAxis { name: "fsdp".into() }.to_string()),
    ]
}

fn shards() -> Vec<Example> {
    let tied = on_two_ranks(|rank, device| {
        let table = Param::from_tensor(Tensor::<2>::ones([4, 4], device));
        rank.shard(Tied { head: table.clone(), table }).map(|_| ())
    });
    let offloaded =
        on_two_ranks(|rank, device| rank.shard(Offloaded { head: LinearConfig::new(4, 4).init(device) }).map(|_| ()));
    let untracked = on_two_ranks(|rank, _| rank.shard(model(&Device::flex())).map(|_| ()));
    vec![
        Example::new("SpecError::TooLong", "", spec(FieldRule::unit().spec([None, Some("shard")]), &[10])),
        Example::new("SpecError::UnknownAxis", "", spec(FieldRule::unit().spec([Some("tensor")]), &[10, 4])),
        Example::new("SpecError::ReplicateAxis", "", spec(FieldRule::unit().spec([Some("replicate")]), &[10, 4])),
        Example::new("SpecError::RepeatedAxis", "", {
            let axes = [Some("shard"), Some("shard")];
            PartitionSpec::parse(axes).resolve("head.weight", &[10, 4], &Mesh::one_dim(4)).unwrap_err().to_string()
        }),
        Example::new("SpecError::NothingCut", "", spec(FieldRule::unit().spec([None, None]), &[10, 4])),
        Example::new("PlanError::Tied", "", tied),
        Example::new("PlanError::NoParameters", "", {
            let ignored = WrapPolicy::new().field("head", FieldRule::ignore());
            planned(ignored, &[("head", 9)]).unwrap_err().to_string()
        }),
        Example::new("Error::Parameter", "A tier without a place", offloaded),
        Example::new("Error::Misuse", "A model on a device without autodiff", untracked),
    ]
}

fn warnings() -> Vec<Example> {
    let blocks = WrapPolicy::new().field("blocks", FieldRule::units());
    let table = WrapPolicy::new().field("tokens", FieldRule::unit());
    let large = warning(blocks.clone(), &[("blocks.0", 9), ("norm", 1)]);
    vec![
        Example::new("PlanWarning::NoUnits", "", warning(WrapPolicy::new(), &[("blocks.0", 9)])),
        Example::new("PlanWarning::RuleMatchesNothing", "", warning(blocks, &[("layers.0", 9)])),
        Example::new("PlanWarning::LargeUnit", "", large),
        Example::new("PlanWarning::HeldTable", "", warning(table, &[("tokens.weight", 32_000 * 512)])),
        Example::new("PlanWarning::HeldFrozen", "", held_frozen()),
    ]
}

/// Two of three blocks are frozen, behind the one that is trained.
fn held_frozen() -> String {
    let block = |index: usize| ParamSpec {
        path: vec!["blocks".into(), index.to_string(), "weight".into()],
        shape: vec![1024, 1024],
        trainable: index == 0,
        ..ParamSpec::default()
    };
    let policy = WrapPolicy::new().field("blocks", FieldRule::units());
    let plan = Plan::new(&policy, &[0, 1, 2].map(block), &Mesh::one_dim(2), Stage::Parameters).unwrap();
    plan.warnings()[0].to_string()
}

fn training() -> Vec<Example> {
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
    vec![
        Example::new("Error::Misuse", "Burn's own backward", loss),
        Example::new("Error::WholeTensorOptimizer", "", optimizer(|| LambConfig::new().init())),
        Example::new("Error::NormClipping", "", clipping),
    ]
}

pub(super) fn examples() -> Vec<Example> {
    [configuration(), meshes(), shards(), warnings(), training()].concat()
}
