//! A communicator whose every operation goes through a [`CommStream`], to run the conformance suite on streams.

use std::sync::Arc;

use bytes::Bytes;
use fsdp_core::{
    AbortCause, CommError, CommStream, Communicator, GatherPart, OpTag, PlacedPart, Reduce, ReducePart, ShardLayout,
};

#[derive(Debug)]
pub(crate) struct Streamed(CommStream);

impl Streamed {
    pub(crate) fn create(comm: Arc<dyn Communicator>) -> Result<Arc<dyn Communicator>, CommError> {
        Ok(Arc::new(Self(CommStream::new(comm, "streamed")?)))
    }
}

impl Communicator for Streamed {
    fn rank(&self) -> usize {
        self.0.communicator().rank()
    }

    fn world_size(&self) -> usize {
        self.0.communicator().world_size()
    }

    fn num_sharing(&self) -> usize {
        self.0.communicator().num_sharing()
    }

    fn all_gather(&self, tag: &OpTag, parts: &[GatherPart]) -> Result<Vec<Bytes>, CommError> {
        self.0.all_gather(tag.clone(), parts.to_vec()).wait()
    }

    fn place(&self, tag: &OpTag, parts: &[GatherPart]) -> Result<Option<Vec<PlacedPart>>, CommError> {
        let (tag, parts) = (tag.clone(), parts.to_vec());
        self.0.submit(move |comm| comm.place(&tag, &parts)).wait()
    }

    fn gather_placed(&self, tag: &OpTag, parts: &[PlacedPart]) -> Result<Vec<Bytes>, CommError> {
        self.0.gather_placed(tag.clone(), parts.to_vec()).wait()
    }

    fn reduce_scatter(&self, tag: &OpTag, parts: &[ReducePart], reduce: Reduce) -> Result<Vec<Bytes>, CommError> {
        self.0.reduce_scatter(tag.clone(), parts.to_vec(), reduce).wait()
    }

    fn all_reduce(&self, tag: &OpTag, parts: &[ReducePart], reduce: Reduce) -> Result<Vec<Bytes>, CommError> {
        self.0.all_reduce(tag.clone(), parts.to_vec(), reduce).wait()
    }

    fn broadcast(&self, tag: &OpTag, root: usize, data: Option<Bytes>) -> Result<Bytes, CommError> {
        let tag = tag.clone();
        self.0.submit(move |comm| comm.broadcast(&tag, root, data)).wait()
    }

    fn scatter(
        &self,
        tag: &OpTag,
        root: usize,
        full: Option<Bytes>,
        layout: &ShardLayout,
        elem_bytes: usize,
    ) -> Result<Bytes, CommError> {
        let (tag, layout) = (tag.clone(), layout.clone());
        self.0.submit(move |comm| comm.scatter(&tag, root, full, &layout, elem_bytes)).wait()
    }

    fn barrier(&self, tag: &OpTag) -> Result<(), CommError> {
        let tag = tag.clone();
        self.0.submit(move |comm| comm.barrier(&tag)).wait()
    }

    fn channel(&self, name: &str) -> Result<Arc<dyn Communicator>, CommError> {
        Self::create(self.0.communicator().channel(name)?)
    }

    fn subgroup(&self, ranks: &[usize]) -> Result<Arc<dyn Communicator>, CommError> {
        Self::create(self.0.communicator().subgroup(ranks)?)
    }

    fn abort(&self, cause: AbortCause) {
        self.0.communicator().abort(cause);
    }

    fn aborted(&self) -> Option<AbortCause> {
        self.0.communicator().aborted()
    }
}
