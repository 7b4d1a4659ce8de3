//! The collectives of one rank, as a process beside others. See [Note: One copy per host].

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

use super::super::call::{Call, CallPart};
use super::super::placed::{PlacedPart, Whole};
use super::super::shared::SharedTensors;
use super::super::sum::write_sum;
use super::super::wire;
use super::super::{AbortCause, CommError, Communicator, GatherPart, OpKind, OpTag, Reduce, ReducePart, not_placed};
use super::domain::{Domain, Op, Stage};
use super::heap::Held;
use super::network::{Payload, Receipt, Span};
use super::output::{Fill, Output, PlacedInProcesses, view};
use super::rounds::{Rounds, window_bytes};
use crate::ShardLayout;

/// Both leaders' agreement, and data of other hosts, as [`Domain::lead`] counts them.
const AGREED: u64 = 1;
const COMPLETE: u64 = 2;

/// One rank's end of a channel or a group.
#[derive(Debug)]
pub(super) struct HostRank {
    domain: Arc<Domain>,
    state: Mutex<State>,
    /// How many channels and groups of each name this rank has asked for.
    num_made: Mutex<HashMap<String, u64>>,
}

#[derive(Debug, Default)]
struct State {
    /// Number of the next operation.
    next: u64,
    /// Bytes that each of the two notes has room for.
    note_bytes: [usize; 2],
    has_windows: bool,
    num_rounds: u64,
}

/// What a member of this host has posted about an operation.
struct Note<'a> {
    blocks: Vec<usize>,
    call: &'a [u8],
}

/// A buffer that a member on another host will send.
struct Expected {
    from: usize,
    held: Arc<Held>,
    receipt: Receipt,
}

impl HostRank {
    pub(super) fn create(domain: Arc<Domain>) -> Arc<dyn Communicator> {
        Arc::new(Self { domain, state: Mutex::default(), num_made: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins an operation: posts what this rank calls, and the blocks that it offers to the ranks of its host.
    fn begin(&self, state: &mut State, call: &Call, blocks: &[usize]) -> Result<Op, CommError> {
        let domain = &*self.domain;
        domain.world.check_alive()?;
        let op = Op { kind: call.kind, tag: call.tag.clone(), number: state.next, call: wire::encode(call) };
        state.next += 1;
        // All have finished the operation before last, whose note is written over. Of most operations that is known, since this
        // one has finished the last; of one that waits for nobody it is not.
        domain.wait_for_cells(&op, |cell| cell.arrived.load(Ordering::Acquire) >= op.number)?;
        let place = (op.number % 2) as usize;
        let numbers = [blocks.len(), op.call.len()].into_iter().chain(blocks.iter().copied());
        let note: Vec<u8> =
            numbers.flat_map(|number| (number as u64).to_le_bytes()).chain(op.call.iter().copied()).collect();
        let [offset, len] = &domain.my_cell().notes[place];
        if note.len() > state.note_bytes[place] {
            let room = note.len().next_power_of_two().max(1024);
            let taken = self.take(&op.tag, room, domain.locals.len())?;
            // Nobody reads the note before last any more.
            let old = offset.swap(taken as u64, Ordering::AcqRel) as usize;
            if old != 0 {
                domain.world.heap.free(old);
            }
            state.note_bytes[place] = room;
        }
        let at = offset.load(Ordering::Relaxed) as usize;
        // SAFETY: This rank's own note of the operation before last, which nobody reads any more.
        unsafe { domain.arena(domain.local).bytes_mut(at, note.len()) }.copy_from_slice(&note);
        len.store(note.len() as u64, Ordering::Relaxed);
        domain.my_cell().arrived.store(op.number + 1, Ordering::Release);
        domain.seat.entry().bell.ring();
        Ok(op)
    }

    /// The note of a member that has arrived.
    fn note(&self, op: &Op, local: usize) -> Note<'_> {
        let [offset, len] = &self.domain.seat.cell(local).notes[(op.number % 2) as usize];
        let (offset, len) = (offset.load(Ordering::Acquire) as usize, len.load(Ordering::Acquire) as usize);
        // SAFETY: The member has arrived, and writes here again only after this rank has begun the next operation.
        let note = unsafe { self.domain.arena(local).bytes(offset, len) };
        let number = |index: usize| {
            let bytes = note[8 * index..].first_chunk().expect("a note begins with its numbers");
            u64::from_le_bytes(*bytes) as usize
        };
        let (num_blocks, call_bytes) = (number(0), number(1));
        let blocks = (0..num_blocks).map(|block| number(2 + block)).collect();
        Note { blocks, call: &note[8 * (2 + num_blocks)..][..call_bytes] }
    }

    fn take(&self, tag: &OpTag, len: usize, num_holders: usize) -> Result<usize, CommError> {
        let world = &self.domain.world;
        world.heap.take(len, num_holders).map_err(|error| {
            world.fail(CommError::Engine { rank: world.rank, tag: tag.clone(), message: error.to_string() })
        })
    }

    /// Waits until every rank has begun the same operation.
    fn meet(&self, op: &Op) -> Result<(), CommError> {
        let domain = &*self.domain;
        domain.wait_for_cells(op, |cell| cell.arrived.load(Ordering::Acquire) > op.number)?;
        self.compare_locals(op)?;
        if domain.others.is_empty() {
            return Ok(());
        }
        if !domain.leads() {
            return domain.wait_for_leader(op, AGREED);
        }
        self.send_call(op);
        self.compare_hosts(op)?;
        domain.lead(op, AGREED);
        Ok(())
    }

    fn compare_locals(&self, op: &Op) -> Result<(), CommError> {
        let domain = &*self.domain;
        let mut others = (0..domain.locals.len()).filter(|&local| local != domain.local);
        others.try_for_each(|local| domain.compare(op, domain.locals[local], self.note(op, local).call))
    }

    /// As the leader: tells the leaders of other hosts the call. Only once all ranks of this host agree, since the others rely on
    /// that.
    fn send_call(&self, op: &Op) {
        self.domain.others.iter().for_each(|host| self.domain.send(op, host[0], Stage::Call, op.call.clone(), None));
    }

    /// As the leader: hears from the leaders of other hosts.
    fn compare_hosts(&self, op: &Op) -> Result<(), CommError> {
        self.domain.others.iter().try_for_each(|host| {
            let frame = self.domain.wait_for_frame(op, host[0], Stage::Call, host)?;
            self.domain.compare(op, host[0], &frame.head)
        })
    }

    /// Tensors that all ranks fill: allocated by the leader of each host, filled by `fill`, and completed from other hosts.
    fn shared(
        &self,
        state: &mut State,
        call: &Call,
        prepare: impl FnOnce(&mut State) -> Result<(), CommError>,
        fill: impl FnOnce(&mut State, &Op, &Output) -> Result<(), CommError>,
    ) -> Result<Vec<Bytes>, CommError> {
        let domain = &*self.domain;
        let (op, output) = self.offer(state, call, prepare)?;
        fill(state, &op, &output)?;
        domain.my_cell().filled.store(op.number + 1, Ordering::Release);
        domain.seat.entry().bell.ring();
        // A reduction has met already.
        let agreed = call.kind == OpKind::AllReduce;
        self.complete(&op, &output, agreed)?;
        // SAFETY: All blocks of all ranks are there, and nobody writes any more.
        Ok(output.held.into_iter().map(|held| unsafe { view(held) }).collect())
    }

    /// Begins an operation on tensors that all ranks fill, in memory that the leader of each host offers.
    fn offer(
        &self,
        state: &mut State,
        call: &Call,
        prepare: impl FnOnce(&mut State) -> Result<(), CommError>,
    ) -> Result<(Op, Output), CommError> {
        let domain = &*self.domain;
        domain.world.check_alive()?;
        let tensors: Vec<_> = call.tensors().collect();
        let lens = || tensors.iter().map(|(layout, elem_bytes)| layout.full_len() * elem_bytes);
        let mut blocks = Vec::new();
        if domain.leads() {
            blocks = lens().map(|len| self.take(&call.tag, len, domain.locals.len())).collect::<Result<_, _>>()?;
        }
        prepare(state)?;
        let op = self.begin(state, call, &blocks)?;
        if !domain.leads() {
            domain.wait_for_leaders_note(&op)?;
            let note = self.note(&op, 0);
            domain.compare(&op, domain.locals[0], note.call)?;
            blocks = note.blocks;
        }
        let hold = |(&offset, len)| Arc::new(Held::new(domain.arena(0).clone(), offset, len));
        let held = blocks.iter().zip(lens()).map(hold).collect();
        Ok((op, Output { tensors, held }))
    }

    /// Waits until all ranks have filled their blocks. Leaders exchange those of their hosts.
    fn complete(&self, op: &Op, output: &Output, agreed: bool) -> Result<(), CommError> {
        let domain = &*self.domain;
        if domain.others.is_empty() || domain.leads() {
            domain.wait_for_cells(op, |cell| cell.filled.load(Ordering::Acquire) > op.number)?;
            if !agreed {
                self.compare_locals(op)?;
            }
        }
        if domain.others.is_empty() {
            return Ok(());
        }
        if !domain.leads() {
            return domain.wait_for_leader(op, COMPLETE);
        }
        let expect = |host: &Vec<usize>| domain.expect(op, host[0], Stage::Data, output.payload(host));
        let receipts: Vec<_> = domain.others.iter().map(|host| (host, expect(host))).collect();
        if !agreed {
            self.send_call(op);
        }
        for host in &domain.others {
            domain.send(op, host[0], Stage::Data, Vec::new(), Some(output.payload(&domain.locals)));
        }
        if !agreed {
            self.compare_hosts(op)?;
        }
        for (host, receipt) in receipts {
            domain.wait_for_receipt(op, host, &receipt)?;
        }
        domain.lead(op, COMPLETE);
        Ok(())
    }

    /// Memory for `len` bytes from each of some members on other hosts.
    fn expect_buffers(
        &self,
        op: &Op,
        from: impl Iterator<Item = usize>,
        len: usize,
    ) -> Result<Vec<Expected>, CommError> {
        let domain = &*self.domain;
        let expect = |from: usize| {
            let held = Arc::new(domain.world.heap.hold(self.take(&op.tag, len, 1)?, len));
            let span = Span { start: held.arena().at(held.offset(), len).as_ptr(), len };
            // SAFETY: A new block, which is read once it is complete.
            let payload = unsafe { Payload::new([span], held.clone()) };
            Ok(Expected { from, held, receipt: domain.expect(op, from, Stage::Data, payload) })
        };
        from.map(expect).collect()
    }

    /// What was expected, by its sender, once it is there.
    fn wait_for_buffers(&self, op: &Op, expected: Vec<Expected>) -> Result<HashMap<usize, Bytes>, CommError> {
        let wait = |Expected { from, held, receipt }: Expected| {
            self.domain.wait_for_receipt(op, &[from], &receipt)?;
            // SAFETY: It is complete.
            Ok((from, unsafe { view(held) }))
        };
        expected.into_iter().map(wait).collect()
    }

    fn remote_ranks(&self) -> impl Iterator<Item = usize> {
        self.domain.others.iter().flatten().copied()
    }

    /// Makes the windows of this rank, once.
    fn make_windows(&self, state: &mut State, tag: &OpTag) -> Result<(), CommError> {
        let domain = &*self.domain;
        if state.has_windows || domain.locals.len() == 1 {
            return Ok(());
        }
        let offset = self.take(tag, window_bytes(domain.locals.len()).1, domain.locals.len())?;
        domain.my_cell().windows.store(offset as u64, Ordering::Release);
        state.has_windows = true;
        Ok(())
    }

    /// Adds this rank's blocks of all ranks, into what `fill` fills with what it is given.
    fn add(
        &self,
        state: &mut State,
        op: &Op,
        mut rounds: Rounds<'_>,
        parts: &[ReducePart],
        reduce: Reduce,
        fill: impl FnOnce(&mut Fill<'_>) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let domain = &*self.domain;
        let own_bytes = |part: &ReducePart| part.layout.shard_len(domain.rank) * part.dtype.size_bytes();
        let expected = self.expect_buffers(op, self.remote_ranks(), parts.iter().map(own_bytes).sum())?;
        for to in self.remote_ranks() {
            let spans = parts.iter().flat_map(|part| {
                let elem_bytes = part.dtype.size_bytes();
                let span = move |run: Range<usize>| Span {
                    start: part.full[run.start * elem_bytes..].as_ptr().cast_mut(),
                    len: run.len() * elem_bytes,
                };
                part.layout.runs(to).map(span)
            });
            let keep: Vec<Bytes> = parts.iter().map(|part| part.full.clone()).collect();
            // SAFETY: The spans lie in the buffers that are kept, which nobody writes.
            let payload = unsafe { Payload::new(spans, keep) };
            domain.send(op, to, Stage::Data, Vec::new(), Some(payload));
        }
        self.meet(op)?;
        let remote = self.wait_for_buffers(op, expected)?;
        // Of this rank's block, over all parts.
        let mut done = 0;
        fill(&mut |part, elements, target| {
            let dtype = parts[part].dtype;
            let len = target.len();
            let at = rounds.next(op, len)?;
            let own = elements.start * dtype.size_bytes()..elements.end * dtype.size_bytes();
            let source = |rank: usize| match domain.locals.iter().position(|&local| local == rank) {
                Some(local) if local == domain.local => &parts[part].full[own.clone()],
                Some(local) => rounds.window(local, at, len),
                None => &remote[&rank][done..done + len],
            };
            let written = write_sum(dtype, (0..domain.ranks.len()).map(source), reduce, target);
            done += len;
            Ok(written)
        })?;
        rounds.finish(op)?;
        state.num_rounds = rounds.end();
        Ok(())
    }

    fn child(&self, name: String, ranks: Vec<usize>) -> Result<Arc<dyn Communicator>, CommError> {
        let domain = &*self.domain;
        domain.world.check_alive()?;
        let mut num_made = self.num_made.lock().unwrap_or_else(PoisonError::into_inner);
        let made = num_made.entry(name.clone()).or_insert(0);
        let path = format!("{}/{name}#{made}", domain.path);
        *made += 1;
        drop(num_made);
        Ok(Self::create(Domain::create(domain.world.clone(), path, ranks)?))
    }
}

impl Communicator for HostRank {
    fn rank(&self) -> usize {
        self.domain.rank
    }

    fn world_size(&self) -> usize {
        self.domain.ranks.len()
    }

    fn num_sharing(&self) -> usize {
        self.domain.locals.len()
    }

    fn all_gather(&self, tag: &OpTag, parts: &[GatherPart]) -> Result<Vec<Bytes>, CommError> {
        self.domain.member().check_gather(tag, parts)?;
        let call = Call::new(OpKind::AllGather, tag).gather(parts);
        let fill = |_: &mut State, _: &Op, output: &Output| {
            output.copy(self.domain.rank, parts.iter().map(|part| &part.shard[..]));
            Ok(())
        };
        self.shared(&mut self.state(), &call, |_| Ok(()), fill)
    }

    fn place(&self, tag: &OpTag, parts: &[GatherPart]) -> Result<Option<Vec<PlacedPart>>, CommError> {
        let domain = &*self.domain;
        domain.member().check_gather(tag, parts)?;
        if !domain.others.is_empty() || !parts.iter().all(PlacedPart::can_hold) {
            return Ok(None);
        }
        let call = Call::new(OpKind::Place, tag).gather(parts);
        let (_, output) = self.offer(&mut self.state(), &call, |_| Ok(()))?;
        output.copy(domain.rank, parts.iter().map(|part| &part.shard[..]));
        let place = |(part, placed): (&GatherPart, PlacedInProcesses)| {
            // SAFETY: This rank has filled its block, and nobody else writes there.
            let shard = unsafe { placed.block(domain.rank) };
            PlacedPart::new(shard, part, Whole::Processes(placed))
        };
        Ok(Some(parts.iter().zip(PlacedInProcesses::of(output)).map(place).collect()))
    }

    fn gather_placed(&self, tag: &OpTag, parts: &[PlacedPart]) -> Result<Vec<Bytes>, CommError> {
        let call = Call::new(OpKind::GatherPlaced, tag).gather_placed(parts);
        let op = self.begin(&mut self.state(), &call, &[])?;
        self.meet(&op)?;
        let whole = |part: &PlacedPart| match part.whole() {
            // SAFETY: Each rank has placed its block before it has come here, and nobody writes any more.
            Whole::Processes(placed) => Ok(unsafe { placed.whole() }),
            Whole::Threads(_) => Err(not_placed(self.domain.world.rank, tag)),
        };
        parts.iter().map(whole).collect()
    }

    fn reduce_scatter(&self, tag: &OpTag, parts: &[ReducePart], reduce: Reduce) -> Result<Vec<Bytes>, CommError> {
        self.reduce_scatter_and_see(tag, parts, reduce, &mut |_, _| ())
    }

    fn reduce_scatter_and_see(
        &self,
        tag: &OpTag,
        parts: &[ReducePart],
        reduce: Reduce,
        see: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<Vec<Bytes>, CommError> {
        self.domain.member().check_reduce(tag, parts)?;
        let state = &mut *self.state();
        self.domain.world.check_alive()?;
        self.make_windows(state, tag)?;
        let call = Call::new(OpKind::ReduceScatter, tag).reduce(parts, reduce);
        let block = SharedTensors::block(self.domain.rank, call.tensors());
        let rounds = Rounds::begin(&self.domain, parts, state.num_rounds);
        let op = self.begin(state, &call, &[])?;
        self.add(state, &op, rounds, parts, reduce, |fill| {
            block.try_fill(self.domain.rank, |part, elements, target| {
                let sums = fill(part, elements, target)?;
                see(part, sums);
                Ok(sums)
            })
        })?;
        Ok(block.views())
    }

    fn all_reduce(&self, tag: &OpTag, parts: &[ReducePart], reduce: Reduce) -> Result<Vec<Bytes>, CommError> {
        self.domain.member().check_reduce(tag, parts)?;
        let call = Call::new(OpKind::AllReduce, tag).reduce(parts, reduce);
        let prepare = |state: &mut State| self.make_windows(state, tag);
        let fill = |state: &mut State, op: &Op, output: &Output| {
            let rounds = Rounds::begin(&self.domain, parts, state.num_rounds);
            self.add(state, op, rounds, parts, reduce, |fill| output.fill(self.domain.rank, fill))
        };
        self.shared(&mut self.state(), &call, prepare, fill)
    }

    fn broadcast(&self, tag: &OpTag, root: usize, data: Option<Bytes>) -> Result<Bytes, CommError> {
        let domain = &*self.domain;
        domain.member().check_root(tag, root, data.is_some())?;
        let state = &mut *self.state();
        domain.world.check_alive()?;
        let call = Call { root: Some(domain.ranks[root]), ..Call::new(OpKind::Broadcast, tag) };
        let num_others = domain.locals.len() - 1;
        let Some(data) = data else {
            let op = self.begin(state, &call, &[])?;
            return self.receive_broadcast(&op, root);
        };
        let mut blocks = Vec::new();
        if num_others > 0 {
            let offset = self.take(tag, data.len(), num_others)?;
            // SAFETY: A new block, which the others read once this rank has arrived.
            unsafe { domain.arena(domain.local).bytes_mut(offset, data.len()) }.copy_from_slice(&data);
            blocks = vec![offset, data.len()];
        }
        let op = self.begin(state, &call, &blocks)?;
        for host in &domain.others {
            let span = Span { start: data.as_ptr().cast_mut(), len: data.len() };
            // SAFETY: The span is the buffer that is kept, which nobody writes.
            let payload = unsafe { Payload::new([span], data.clone()) };
            domain.send(&op, host[0], Stage::Data, Vec::new(), Some(payload));
        }
        self.meet(&op)?;
        Ok(data)
    }

    fn scatter(
        &self,
        tag: &OpTag,
        root: usize,
        full: Option<Bytes>,
        layout: &ShardLayout,
        elem_bytes: usize,
    ) -> Result<Bytes, CommError> {
        let domain = &*self.domain;
        domain.member().check_scatter(tag, root, full.as_ref().map(Bytes::len), layout, elem_bytes)?;
        let state = &mut *self.state();
        domain.world.check_alive()?;
        let parts = vec![CallPart { layout: layout.clone(), elem_bytes, dtype: None }];
        let call = Call { root: Some(domain.ranks[root]), parts, ..Call::new(OpKind::Scatter, tag) };
        let block = SharedTensors::block(domain.rank, call.tensors());
        let Some(full) = full else {
            let op = self.begin(state, &call, &[])?;
            self.meet(&op)?;
            match domain.locals.iter().position(|&rank| rank == root) {
                Some(local) => {
                    let len = layout.shard_len(domain.rank) * elem_bytes;
                    let offset = self.note(&op, local).blocks[domain.local];
                    let held = Held::new(domain.arena(local).clone(), offset, len);
                    // SAFETY: The root has arrived, so it has written the block.
                    let source = unsafe { held.arena().bytes(held.offset(), len) };
                    block.copy(domain.rank, [source]);
                }
                None => {
                    let own_bytes = layout.shard_len(domain.rank) * elem_bytes;
                    let expected = self.expect_buffers(&op, std::iter::once(root), own_bytes)?;
                    let received = self.wait_for_buffers(&op, expected)?;
                    block.copy(domain.rank, [&received[&root][..]]);
                }
            }
            return Ok(block.views().remove(0));
        };
        let span_of = |run: Range<usize>| run.start * elem_bytes..run.end * elem_bytes;
        let mut blocks = vec![0; domain.locals.len()];
        for (offset, &rank) in blocks.iter_mut().zip(&domain.locals).filter(|(_, rank)| **rank != domain.rank) {
            *offset = self.take(tag, layout.shard_len(rank) * elem_bytes, 1)?;
            let mut at = *offset;
            for bytes in layout.runs(rank).map(span_of) {
                // SAFETY: A new block, which its rank reads once this rank has arrived.
                unsafe { domain.arena(domain.local).bytes_mut(at, bytes.len()) }.copy_from_slice(&full[bytes.clone()]);
                at += bytes.len();
            }
        }
        let op = self.begin(state, &call, &blocks)?;
        for to in self.remote_ranks() {
            let spans = layout.runs(to).map(span_of);
            let spans = spans.map(|bytes| Span { start: full[bytes.start..].as_ptr().cast_mut(), len: bytes.len() });
            // SAFETY: The spans lie in the buffer that is kept, which nobody writes.
            let payload = unsafe { Payload::new(spans, full.clone()) };
            domain.send(&op, to, Stage::Data, Vec::new(), Some(payload));
        }
        self.meet(&op)?;
        block.fill_runs(domain.rank, |_, elements, target| target.write_copy_of_slice(&full[span_of(elements)]));
        Ok(block.views().remove(0))
    }

    fn barrier(&self, tag: &OpTag) -> Result<(), CommError> {
        let op = self.begin(&mut self.state(), &Call::new(OpKind::Barrier, tag), &[])?;
        self.meet(&op)
    }

    fn channel(&self, name: &str) -> Result<Arc<dyn Communicator>, CommError> {
        self.child(format!("channel {name}"), self.domain.ranks.clone())
    }

    fn subgroup(&self, ranks: &[usize]) -> Result<Arc<dyn Communicator>, CommError> {
        self.domain.member().check_group(ranks)?;
        let world_ranks = ranks.iter().map(|&rank| self.domain.ranks[rank]).collect();
        self.child(format!("group {ranks:?}"), world_ranks)
    }

    fn leave(&self) {
        let world = &self.domain.world;
        if let Some(local) = world.local.iter().position(|&rank| rank == world.rank) {
            world.table.left(local).store(1, Ordering::Release);
        }
        // Ranks of this host see it in the table.
        let far = |&rank: &usize| world.hosts[rank] != world.hosts[world.rank];
        (0..world.hosts.len()).filter(far).for_each(|rank| world.network.leave(rank, world.number));
        world.control.leave();
    }

    fn abort(&self, cause: AbortCause) {
        self.domain.world.control.abort(cause);
    }

    fn aborted(&self) -> Option<AbortCause> {
        self.domain.world.control.aborted()
    }
}

impl HostRank {
    /// As a rank that is not the root.
    fn receive_broadcast(&self, op: &Op, root: usize) -> Result<Bytes, CommError> {
        let domain = &*self.domain;
        self.meet(op)?;
        if let Some(local) = domain.locals.iter().position(|&rank| rank == root) {
            let [offset, len] = self.note(op, local).blocks[..] else {
                return Err(domain.world.fail(domain.engine_error(op, "the root offers no block".to_owned())));
            };
            let held = Arc::new(Held::new(domain.arena(local).clone(), offset, len));
            // SAFETY: The root has arrived, so it has written the block.
            return Ok(unsafe { view(held) });
        }
        let [led_offset, led_len] = &domain.seat.entry().led_block;
        if domain.leads() {
            let frame = domain.wait_for_frame(op, root, Stage::Data, &[root])?;
            let len = frame.payload_bytes;
            let offset = self.take(&op.tag, len, domain.locals.len())?;
            let held = Arc::new(domain.world.heap.hold(offset, len));
            let span = Span { start: held.arena().at(offset, len).as_ptr(), len };
            // SAFETY: A new block, which nobody reads before the leader says so.
            let payload = unsafe { Payload::new([span], held.clone()) };
            let receipt = domain.receive(root, frame, payload);
            domain.wait_for_receipt(op, &[root], &receipt)?;
            led_offset.store(offset as u64, Ordering::Relaxed);
            led_len.store(len as u64, Ordering::Relaxed);
            domain.lead(op, COMPLETE);
            // SAFETY: It is complete.
            return Ok(unsafe { view(held) });
        }
        domain.wait_for_leader(op, COMPLETE)?;
        let (offset, len) = (led_offset.load(Ordering::Relaxed), led_len.load(Ordering::Relaxed));
        let held = Arc::new(Held::new(domain.arena(0).clone(), offset as usize, len as usize));
        // SAFETY: The leader has said that it is complete.
        Ok(unsafe { view(held) })
    }
}
