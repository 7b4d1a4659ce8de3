//! The communicators of one sharded model on one rank: who it talks to, and in which independent order.

use std::sync::{Arc, Mutex, PoisonError, Weak};

#[cfg(any(feature = "cuda", feature = "cpu"))]
use fsdp_core::Exchange;
use fsdp_core::{Axis, CommError, CommStream, Communicator, Mesh};

/// Gathers and reductions each have an order of their own and a thread that executes it, so that a gather never waits
/// behind a reduction. Placing and control messages run on the caller's thread.
pub(crate) struct Links {
    /// All-gathers over the shard axis.
    pub(crate) gather: Arc<CommStream>,
    /// Where blocks are placed for gathers without a copy, by the rank's own thread.
    pub(crate) place: Arc<dyn Communicator>,
    /// All-gathers in backward, on the same thread: over the neighbours that a unit stays cut over after forward, where these
    /// are not all of the shard axis.
    pub(crate) regather: Option<Arc<dyn Communicator>>,
    /// Runs the reductions, over the three groups below.
    pub(crate) reduce: Arc<CommStream>,
    /// Reductions over the shard axis.
    pub(crate) reduce_shard: Arc<dyn Communicator>,
    /// Reductions over the replicate axis, if there is one.
    pub(crate) reduce_replicas: Option<Arc<dyn Communicator>>,
    /// Reductions over all ranks.
    pub(crate) reduce_world: Arc<dyn Communicator>,
    /// Small messages among all ranks.
    pub(crate) control: Arc<dyn Communicator>,
    /// Small messages over the shard axis.
    pub(crate) control_shard: Arc<dyn Communicator>,
    /// What gathers and reduces in place of the first ones, where tensors stay on devices. See [Note: Two places of a gather].
    #[cfg(any(feature = "cuda", feature = "cpu"))]
    pub(crate) devices: Option<crate::peers::DeviceLinks>,
}

impl Links {
    /// Every rank makes this call at the same point of its program.
    pub(crate) fn new(
        world: &dyn Communicator,
        streams: &Streams,
        mesh: &Mesh,
        resharding: Option<usize>,
    ) -> Result<Self, CommError> {
        let rank = world.rank();
        let shard_ranks = mesh.group(Axis::Shard, rank);
        let replicas = mesh.group(Axis::Replicate, rank);
        let over_shards = |channel: &str| world.channel(channel)?.subgroup(&shard_ranks);
        let reduce_replicas = match replicas.len() {
            0 | 1 => None,
            _ => Some(world.channel("reduce over replicas")?.subgroup(&replicas)?),
        };
        let neighbours = resharding.and_then(|num_ranks| {
            let first = mesh.coordinate(Axis::Shard, rank) / num_ranks * num_ranks;
            shard_ranks.get(first..first + num_ranks)
        });
        let regather = neighbours.map(|ranks| world.channel("gather again")?.subgroup(ranks)).transpose()?;
        let reduce_world = world.channel("reduce over the world")?;
        Ok(Self {
            gather: streams.start(over_shards("gather")?, "gather")?,
            place: over_shards("place")?,
            regather,
            reduce: streams.start(reduce_world.clone(), "reduce")?,
            reduce_shard: over_shards("reduce over shards")?,
            reduce_replicas,
            reduce_world,
            control: world.channel("control")?,
            control_shard: over_shards("control over shards")?,
            #[cfg(any(feature = "cuda", feature = "cpu"))]
            devices: None,
        })
    }

    /// With peers on devices, where the configuration wants them. Every rank makes this call.
    #[cfg(any(feature = "cuda", feature = "cpu"))]
    pub(crate) fn with_devices(self, rank: &crate::Rank) -> Result<Self, crate::Error> {
        let model = rank.next_model();
        let devices = match rank.config().collectives {
            Exchange::Host => None,
            Exchange::Device | Exchange::Inline => Some(crate::peers::DeviceLinks::connect(rank, model, &self)?),
        };
        Ok(Self { devices, ..self })
    }
}

/// The streams of all models of one rank.
///
/// A model may outlive its rank's program: the program may return it, and a graph that no backward has taken holds on to it until
/// Burn clears graphs up, at some later forward. What it has under way, gathers for the next step, must run before the rank
/// leaves, since the other ranks wait for it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Streams(Arc<Mutex<Vec<Weak<CommStream>>>>);

impl Streams {
    fn start(&self, communicator: Arc<dyn Communicator>, name: &str) -> Result<Arc<CommStream>, CommError> {
        let stream = Arc::new(CommStream::new(communicator, name)?);
        let mut streams = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(Arc::downgrade(&stream));
        Ok(stream)
    }

    /// Waits until nothing is under way.
    pub(crate) fn drain(&self) {
        let streams = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        streams.iter().filter_map(Weak::upgrade).for_each(|stream| stream.drain());
    }
}
