//! A step before it is run: the schedule's own actions, priced, on any number of ranks.

mod job;
mod offload;
mod program;
mod ranks;
mod replay;
mod run;
mod search;
mod tiers;
mod timeline;
mod workload;

pub use job::{Collectives, Job, Machine, MeasuredLinks, Speed, TierRates};
pub use offload::TierBytes;
pub use program::{BackwardUse, Instruction, Program, StepRules, Uses};
pub use ranks::Scope;
pub use replay::{Recorded, ReplayError};
pub use run::{SimOptions, SimReport, SimSpan, simulate};
pub use search::{Search, SearchLimits, Tried, Variation, sensitivity};
pub use tiers::{Moved, TierTraffic};
pub use timeline::timeline;
pub use workload::{Move, Placed, TierWork, UnitWork, Wire, Workload};
