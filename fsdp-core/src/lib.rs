//! Sharded training, without a tensor library: everything that can be decided and checked with plain numbers and bytes.
//!
//! # Words
//!
//! | word | meaning |
//! |---|---|
//! | *rank* | one participant, numbered from 0: a thread, or a process |
//! | *world size* | number of ranks |
//! | *mesh*, *axis* | the ranks as a grid; along `shard` they hold different parts, along `replicate` equal ones |
//! | *coordinate* | a rank's index along one axis |
//! | *dimension* | of a tensor; a mesh has axes |
//! | *unit* | parameters that are gathered, freed, reduced and stepped together |
//! | *root unit* | the parameters that no rule puts elsewhere |
//! | *block* | the rows of one parameter that one rank owns |
//! | *shard* | all that one rank owns of something that is cut |
//! | *split*, *whole* | a parameter that is cut over the ranks, or not |
//! | *resident* | whole on every rank all the time |
//! | *gather* | all-gather: from blocks on all ranks to whole tensors on each |
//! | *reduce* | sum over ranks: a reduce-scatter leaves each rank its block, an all-reduce the whole |
//! | *publish* | gather updated blocks after an optimizer step (stages 1 and 2) |
//! | *prefetch depth* | units gathered ahead of the one that computes |
//! | *stage* | how much is cut: see [`Stage`] |
//!
//! `num_` counts things, `_len` counts elements, `_bytes` bytes.
//!
//! # Map
//!
//! Each module imports only those above it.
//!
//! | module | what it decides |
//! |---|---|
//! | `table` | text in columns |
//! | `dtype`, `stage`, `policy`, `layout`, `mesh` | element types; the stages; a model's rules; who owns which elements; ranks as a grid |
//! | `spec` | which axis cuts which dimension of a parameter |
//! | `action`, `schedule` | when units are gathered, freed, reduced and stepped |
//! | `launcher` | which rank a process is, by what its launcher has set |
//! | `config` | the settings of a run: read, checked, printed, explained |
//! | `plan` | the rules applied to a model: its units |
//! | `memory`, `cost` | bytes per rank; traffic and time of a step |
//! | `trace` | spans of a run, written for a viewer of traces |
//! | `hardware`, `shape`, `transformer` | devices and links by name; models as sizes |
//! | `simulate`, `forecast` | a step priced and run on many ranks; all stages side by side |
//! | `comm` | collectives: the contract, threads as ranks, processes that share memory ([`hosts`]), and wrappers |
//! | `net` | how processes find each other, and learn of each other's failures |
//! | `socket` | processes as ranks, connected by sockets |
//! | `tier` | a store below memory: a rank's state in a file on a fast disk |
//! | `profile` | what was measured of a machine |
//! | [`checkpoint`] | saved state: its format, how it is committed, and how another world reads it |
//! | `testing` | ranks under a time limit, and the suite every communicator must pass (feature `testing`) |

mod action;
pub mod checkpoint;
mod comm;
mod config;
mod cost;
mod dtype;
mod forecast;
mod frozen;
mod hardware;
mod launcher;
mod layout;
mod loss_scale;
mod memory;
mod mesh;
#[cfg(all(feature = "mpi", target_os = "linux"))]
mod mpi;
mod net;
mod parts;
mod plan;
mod plan_memory;
mod policy;
mod profile;
mod schedule;
mod shape;
mod simulate;
mod socket;
mod spec;
mod stage;
mod table;
#[cfg(feature = "testing")]
pub mod testing;
mod tier;
mod trace;
mod transformer;
mod unit_state;

pub use action::{Action, PrefetchDepth, UnitIndex, UnitTiers, UnitTraits};
#[cfg(target_os = "linux")]
pub use comm::hosts;
pub use comm::{
    AbortCause, CommError, CommStream, Communicator, Control, Fault, FaultPlan, Faulty, GatherPart, Issued, LocalWorld,
    LoggedOp, OpCount, OpKind, OpTag, Pending, Phase, PlacedPart, Recorder, Reduce, ReducePart, Timing, Traffic,
};
pub use config::{
    Accumulate, Buffers, Config, ConfigError, ConfigKey, DeviceChoice, Exchange, Fate, GradientReduction, Location,
    NonFinite, OffloadConfig, Place, PrecisionConfig, PrefetchConfig, TierShares, TrainingConfig, Translated,
    TranslatedItem, config_keys,
};
pub use cost::{Link, StepTime, StepTraffic, TrafficModel, UnitTraffic};
pub use dtype::Dtype;
pub use forecast::{Advice, Forecast, StageForecast};
pub use hardware::{Device, Disk, NamedLink, Network, Placement, TierRate};
pub use launcher::{Environment, Launcher, LauncherChoice, LauncherError, ProcessPlace, ProcessRank, Started};
pub use layout::ShardLayout;
pub use loss_scale::{LossScale, LossScaler};
pub use memory::{
    Activations, ComputePrecision, MemoryEstimate, MemoryModel, OptimizerKind, TierModel, human_bytes, min_ranks,
};
pub use mesh::{Axis, Mesh, MeshError};
#[cfg(all(feature = "mpi", target_os = "linux"))]
pub use mpi::{Mpi, MpiWorld};
pub use net::{ControlChannel, Entrance, Member, Refusal, RendezvousError, Secret, Standing, Stragglers};
pub use plan::{ParamSpec, Plan, PlanError, PlanWarning, PlannedParam, ROOT_UNIT, Unit};
pub use plan_memory::PlanMemory;
pub use policy::{FieldRule, Role, UnitOverrides, WrapPolicy};
pub use profile::{MeasuredStep, Profile, ProfileError, ProfileOptions, WorkTime};
pub use schedule::Schedule;
pub use shape::{MOST_ELEMENTS, ModelShape, ParamShape, ShapeError, UnitShape};
pub use simulate::{
    BackwardUse, Collectives, Instruction, Job, Machine, MeasuredLinks, Move, Moved, Placed, Program, Recorded,
    ReplayError, Scope, Search, SearchLimits, SimOptions, SimReport, SimSpan, Speed, StepRules, TierBytes, TierRates,
    TierTraffic, TierWork, Tried, UnitWork, Uses, Variation, Wire, Workload, sensitivity, simulate, timeline,
};
pub use socket::SocketWorld;
pub use spec::{PartitionSpec, SpecError};
pub use stage::{Stage, UnknownStage};
pub use table::{Table, grouped};
pub use tier::{Slot, Tier, TierEngine, TierError, TierOptions, TierStats, Transfer};
pub use trace::{Span, SpanKind, Trace, TraceStream};
pub use transformer::Transformer;
pub use unit_state::{UnitState, WrongOrder};
