//! Sharded training, without a tensor library.

mod comm;
mod config;
mod cost;
mod dtype;
mod layout;
mod memory;
mod mesh;
mod plan;
mod policy;
mod schedule;
mod spec;
mod stage;
#[cfg(feature = "testing")]
pub mod testing;
mod trace;

pub use comm::{
    AbortCause, CommError, CommStream, Communicator, Fault, FaultPlan, Faulty, GatherPart, Issued, LocalWorld,
    LoggedOp, OpCount, OpKind, OpTag, Pending, Phase, Recorder, Reduce, ReducePart, Timing, Traffic,
};
pub use config::{
    Accumulate, Config, ConfigError, ConfigKey, GradientReduction, Location, NonFinite, Place, PrefetchConfig,
    TrainingConfig, config_keys,
};
pub use cost::{Link, StepTime, StepTraffic, TrafficModel, UnitTraffic};
pub use dtype::Dtype;
pub use layout::ShardLayout;
pub use memory::{ComputePrecision, MemoryEstimate, MemoryModel, OptimizerKind, human_bytes, min_ranks};
pub use mesh::{Axis, Mesh, MeshError};
pub use plan::{ParamSpec, Plan, PlanError, PlanWarning, PlannedParam, ROOT_UNIT, Unit};
pub use policy::{FieldRule, Role, UnitOverrides, WrapPolicy};
pub use schedule::{Action, PrefetchDepth, Schedule, UnitIndex, UnitState, UnitTraits, WrongOrder};
pub use spec::{PartitionSpec, SpecError};
pub use stage::{Stage, UnknownStage};
pub use trace::{Span, SpanKind, Trace, TraceStream};
