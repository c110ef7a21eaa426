"""The gradient reducer: it collects gradients during backward and reduces buckets in a fixed order.

A *reduce pass* reduces every bucket once, in order. A bucket is launched as soon as all gradients that it expects have
arrived and all earlier buckets are launched. When the backward ends the remaining buckets are launched, with zeros for
missing gradients. So ranks may run different modules (or none) and still call the same reductions. A gradient that
arrives after the launch of its bucket is reduced in the next pass; at the step all ranks agree on the buckets with
gradients that no pass has reduced, and reduce these.
"""

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from partita.comm.collectives import Collectives
from partita.errors import PartitaError
from partita.memory import accelerator
from partita.memory.allocate import over
from partita.memory.buffer_pool import BufferPool, Slot
from partita.memory.ledger import Ledger
from partita.memory.step_events import in_span, span
from partita.memory.streams import Event, after, record
from partita.sharding.buckets import Bucket
from partita.sharding.finite import FiniteWatch
from partita.sharding.gradient_buffer import PooledBuffer
from partita.sharding.gradient_sync import SyncCall
from partita.sharding.interpreter import Interpreter
from partita.sharding.parameter import Member
from partita.sharding.segment import Segment
from partita.sharding.sync_states import SyncStates
from partita.table.residence import Tier
from partita.table.slots import RECEIVING, SENDING, SUMMED, PlannedPool, bucket_pools

# loss scales of the running backwards; a global, because autograd runs hooks on its own threads
_loss_scales: list[float] = []


@contextmanager
def scaled_by(factor: float) -> Iterator[None]:
    """Context of a backward whose loss was multiplied by ``factor``."""
    _loss_scales.append(factor)
    try:
        yield
    finally:
        _loss_scales.pop()


def factor_under_way() -> float:
    """Return the loss scale of the gradients that arrive now."""
    return _loss_scales[-1] if _loss_scales else 1.0


class GradientPools:
    """Buffer pools for collecting gradients, for receiving, and for reduced gradients that are not stored."""

    def __init__(self, buckets: Sequence[Bucket], ledger: Ledger, device: torch.device) -> None:
        self._in_pieces = accelerator.is_host(device)

        def pool(planned: PlannedPool, tier: Tier = Tier.DEVICE) -> BufferPool:
            return BufferPool("buckets", planned, ledger, device, tier=tier)

        planned = bucket_pools([bucket.layout.planned for bucket in buckets], in_pieces=self._in_pieces)
        self._collecting = pool(planned.sending)
        self._receiving = pool(planned.receiving)
        self._sums = {tier: pool(of_tier, tier) for tier, of_tier in planned.summed.items()}
        self._scratch_bytes = {id(bucket): self._bytes_to_receive(bucket) for bucket in buckets}

    def __iter__(self) -> Iterator[BufferPool]:
        """All pools."""
        return iter((self._collecting, self._receiving, *self._sums.values()))

    def provide(self, bucket: Bucket) -> None:
        """Add slots for another bucket."""
        num_bytes = self._scratch_bytes[id(bucket)] = self._bytes_to_receive(bucket)
        if not bucket.moves:
            return
        if num_bytes:
            self._receiving.provide(num_bytes, RECEIVING)
        if bucket.is_pooled:
            self._collecting.provide(bucket.num_bytes, SENDING)
        if bucket.sums_tier is not None:
            self._sums[bucket.sums_tier].provide(bucket.shard_bytes, SUMMED)

    def _bytes_to_receive(self, bucket: Bucket) -> int:
        return bucket.layout.planned.scratch_bytes(in_pieces=self._in_pieces)

    # ---------------------------------------------------------------- collecting

    def assign_slot(self, bucket: Bucket) -> None:
        """Give a bucket a slot to collect gradients in, if it needs one and has none."""
        if isinstance(bucket.buffer, PooledBuffer) and bucket.buffer.full is None:
            bucket.buffer.borrow(self._collecting.borrow(bucket.num_bytes))

    def release_sent(self, slot: Slot, last_use: Event) -> None:
        """Return a bucket's slot, which is free once ``last_use`` has passed."""
        self._collecting.give_back(slot, last_use)

    # ----------------------------------------------------------------- receiving

    def scratch(self, buckets: Sequence[Bucket]) -> Slot | None:
        """Borrow a slot for receiving in the largest of these buckets; None if none of them needs one."""
        num_bytes = max((self._scratch_bytes[id(bucket)] for bucket in buckets), default=0)
        return self._receiving.borrow(num_bytes) if num_bytes else None

    def scratch_of(self, slot: Slot | None, bucket: Bucket) -> Tensor | None:
        """Return the memory of such a slot as a tensor for one bucket."""
        if slot is None or not (num_bytes := self._scratch_bytes[id(bucket)]):
            return None
        return over(slot.storage, bucket.dtype, num_bytes // bucket.dtype.itemsize)

    def release_scratch(self, slot: Slot | None, last_use: Event) -> None:
        """Return such a slot, which is free once ``last_use`` has passed."""
        if slot is not None:
            self._receiving.give_back(slot, last_use)

    # ---------------------------------------------------------------------- sums

    def acquire_sum(self, bucket: Bucket) -> Slot | None:
        """Borrow a slot for the bucket's reduced gradients; None if these are stored."""
        return None if bucket.sums_tier is None else self._sums[bucket.sums_tier].borrow(bucket.shard_bytes)

    def release_sum(self, slot: Slot, bucket: Bucket, used: Event) -> None:
        """Return such a slot, which is free once ``used`` has passed."""
        assert bucket.sums_tier is not None
        self._sums[bucket.sums_tier].give_back(slot, used)


class GradientUser(Protocol):
    """The optimizer side that uses reduced gradients. ``steps``: the number of steps so far."""

    steps: int

    @property
    def loss_scale(self) -> float: ...

    def begin(self) -> None:
        """Called before the first gradient of a backward."""

    def use(self, bucket: Bucket) -> Event:
        """Use reduced gradients that are not stored, whose reduction is queued. Returns the event of their last use."""

    def unfreeze(self, segment: Segment) -> None:
        """Called when a segment begins to train."""


@dataclass
class _ReducePass:
    """The state of the current reduce pass.

    Attributes:
        next: the index of the first bucket that was not launched.
        task: autograd's graph task id of the running backward.
        took_part: True if this micro-batch brought a gradient or has joined the other ranks' reductions.
    """

    next: int = 0
    task: int | None = None
    took_part: bool = False


class GradientReducer:
    """Collects and reduces the gradients of all buckets: their mean over the ranks and the micro-batches of a step.

    Attributes:
        scales: the loss scales of this rank's gradients since the last update.
        placeholder_members: members whose ``.grad`` is a placeholder, after a complete batch.
        num_passes: the number of reduce passes that have ended.
        sync_states: the states of all buckets' syncs between steps.
        finite: watches losses and gradients for non-finite values.
        gradient_sink: if set, receives parameters and gradients in place of the buckets.
    """

    def __init__(self, buckets: list[Bucket], collectives: Collectives, ledger: Ledger) -> None:
        self.buckets = buckets
        self._interpreter = Interpreter(collectives)
        self.sync_states = SyncStates(buckets, self._interpreter)
        self._is_warming_up = False
        self._device = collectives.mesh.device
        self._bucket_of = {id(member): bucket for bucket in buckets for member in bucket.members}
        self._order = [bucket for bucket in buckets if bucket.moves]

        self.pools = GradientPools(buckets, ledger, self._device)
        self.finite = FiniteWatch()
        self._stream = collectives.mesh.stream("gradients")
        self._launched = Event()  # passes when everything launched so far is reduced
        self._reduce_pass = _ReducePass()
        self._is_last_micro_batch = True
        self._synchronizes = True
        self._user: GradientUser | None = None
        self.gradient_sink: Callable[[nn.Parameter, Tensor], None] | None = None
        self.scales = set[float]()
        self.placeholder_members = list[Member]()
        self.num_passes = 0
        self._num_seeds = 0  # since the last update

    def connect(self, user: GradientUser) -> None:
        """Set the user of the gradients; called once, before the first backward."""
        self._user = user

    def add(self, bucket: Bucket) -> None:
        """Add the bucket of a segment that begins to train; it is reduced last."""
        self.buckets.append(bucket)
        bucket.warm_up(self._is_warming_up)
        self._bucket_of.update((id(member), bucket) for member in bucket.members)
        self.pools.provide(bucket)
        if bucket.moves:
            self._order.append(bucket)
        assert self._user is not None
        for segment in bucket.segments:
            self._user.unfreeze(segment)

    def warm_up(self, is_warming_up: bool) -> None:
        """Use the syncs of the warm-up, or those of later steps, from the next step."""
        self._is_warming_up = is_warming_up
        for bucket in self.buckets:
            bucket.warm_up(is_warming_up)

    def bucket_of(self, member: Member) -> Bucket | None:
        """Return the bucket of a member; None if it does not train."""
        return self._bucket_of.get(id(member))

    # ------------------------------------------------- configuration of a reduce pass

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Begin a micro-batch. Only the last one of a step reduces gradients that are collected in full buffers."""
        self._is_last_micro_batch = is_last

    @property
    def holds_batch(self) -> bool:
        """True if this rank has gradients of a step's last micro-batch."""
        return self._is_last_micro_batch and any(bucket.arrivals.used for bucket in self.buckets)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context that keeps gradients in ``.grad``, unreduced."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    def _reducing(self, bucket: Bucket) -> bool:
        """Return whether this backward reduces the bucket."""
        return bucket.moves and self._synchronizes and (self._is_last_micro_batch or bucket.is_pooled)

    # ---------------------------------------------------------------- in backward

    def backward_began(self) -> None:
        """Note that a backward has begun: the reduce pass ends with it. Later calls in the same backward do nothing."""
        task = torch._C._current_graph_task_id()
        if task != -1 and self._reduce_pass.task is None:
            assert self._user is not None
            self._user.begin()
            self._reduce_pass.task = task
            self._remove_placeholders()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def arrived(self, member: Member) -> None:
        """Handle a parameter's gradient, which is in its ``.grad``.

        Raises:
            PartitaError: the gradient is sparse, and ranks have shards of it at the step.
        """
        bucket = self._bucket_of[id(member)]
        collects = bucket.buffer.collects
        in_pass = collects and self.gradient_sink is None and (self._synchronizes or bucket.buffer.keeps_full)
        if in_pass:
            self.backward_began()
        elif self.placeholder_members:
            assert self._user is not None
            self._user.begin()
            self._remove_placeholders()
        grad = member.param.grad
        if grad is not None and grad.layout is not torch.strided:
            if bucket.plan.grad_step.shard_axes:
                raise PartitaError(
                    f"the gradient of '{member.fqn}' is sparse ({grad.layout}), but only dense gradients are sharded: "
                    "build the module with sparse=False, or set zero.stage: 0"
                )
            grad = member.param.grad = grad.to_dense()
        if self.gradient_sink is not None and grad is not None and collects:
            member.param.grad = None
            self.gradient_sink(member.param, grad)
            return
        self._reduce_pass.took_part = True
        self.scales.add(factor_under_way())
        bucket.note(member, in_pass=in_pass)
        if not in_pass:
            return
        if bucket.buffer.keeps_full:
            bucket.reopen()
            bucket.collect(member)
        elif self._order[self._reduce_pass.next :][:1] == [bucket]:
            self.pools.assign_slot(bucket)
            bucket.collect(member)
        if self._reducing(bucket):
            self._launch_complete()

    def _end_backward(self) -> None:
        self._reduce_pass.task = None
        if any(bucket.arrivals.fresh for bucket in self.buckets):
            self.end_pass()

    def _launch_complete(self) -> None:
        while self._reduce_pass.next < len(self._order) and self._order[self._reduce_pass.next].arrivals.is_complete:
            self._launch(self._order[self._reduce_pass.next])
            self._reduce_pass.next += 1

    def launch_stalled_bucket(self) -> None:
        """Launch the next bucket although gradients are missing, if other ranks seem to wait for it.

        Called when other ranks do not respond. This rank is the cause if a later bucket is complete. Gradients that
        arrive later are reduced at the step.
        """
        later = self._order[self._reduce_pass.next + 1 :]
        if self._reduce_pass.task is not None and any(
            bucket.arrivals.is_complete and self._reducing(bucket) for bucket in later
        ):
            self._launch(self._order[self._reduce_pass.next])
            self._reduce_pass.next += 1
            self._launch_complete()

    def join(self) -> None:
        """Join the other ranks' reductions, with zeros, if this micro-batch brought no gradient."""
        if not self._reduce_pass.took_part:
            self.end_pass()
        self._reduce_pass.took_part = True

    def end_micro_batch(self) -> None:
        """End this rank's micro-batch."""
        self.join()
        self._reduce_pass.took_part = False

    def end_pass(self) -> None:
        """Launch the remaining buckets of this reduce pass, with zeros for missing gradients."""
        if self._order and self._reducing(self._order[0]):
            for bucket in self._order[self._reduce_pass.next :]:
                self._launch(bucket)
            self.num_passes += 1
            self._reduce_pass.took_part = True
        self._begin_pass()
        if self._is_last_micro_batch:
            self.set_placeholders()

    def _begin_pass(self) -> None:
        for bucket in self.buckets:
            bucket.arrivals.end_pass()
        self._reduce_pass.next = 0

    @property
    def dropped_members(self) -> list[Member]:
        """The members whose gradients the user has dropped from ``.grad`` since the batch was complete."""
        with torch._C.DisableTorchFunctionSubclass():
            return [member for member in self.placeholder_members if member.is_dropped]

    def set_placeholders(self) -> None:
        """Set the ``.grad`` of a batch's parameters to placeholders."""
        self.placeholder_members = [
            m for b in self.buckets if b.buffer.collects for m in b.members if id(m) in b.arrivals.used
        ]
        with torch._C.DisableTorchFunctionSubclass():
            for member in self.placeholder_members:
                member.mark_placeholder()

    def _remove_placeholders(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for member in self.placeholder_members:
                member.unmark_placeholder()
        self.placeholder_members.clear()

    # ------------------------------------------------------------- one reduction

    def _launch(self, bucket: Bucket) -> None:
        """Queue a bucket's reduction, with zeros for missing gradients."""
        if bucket.buffer.keeps_full:
            bucket.reopen()
        else:
            self.pools.assign_slot(bucket)
        bucket.fill_up()
        if self.finite.traces:
            self.finite.watch(bucket.buffer.total())
        scratch, sums = self.pools.scratch([bucket]), self.pools.acquire_sum(bucket)
        call = SyncCall(self._seeded(), self.pools.scratch_of(scratch, bucket))
        reduce = bucket.launch(call, sums, self._scale_of(bucket))
        awaited = [record(self._device), *(slot.last_use for slot in (scratch, sums) if slot is not None)]
        self._launched = self._stream.run(in_span(partial(after, awaited, reduce), "reduce", bucket.members[0].fqn))
        self.pools.release_scratch(scratch, self._launched)
        if (sent := bucket.launched(self._launched)) is not None:
            self.pools.release_sent(sent, self._launched)
        if sums is not None:
            assert self._user is not None
            self.pools.release_sum(sums, bucket, self._user.use(bucket))

    def _seeded(self) -> Interpreter:
        """Return an interpreter with a seed that depends only on the step and the number of the call within it."""
        assert self._user is not None
        self._num_seeds += 1
        return self._interpreter.seeded(self._user.steps, self._num_seeds)

    def _scale_of(self, bucket: Bucket) -> float:
        """Return the loss scale of the bucket's gradients.

        A rank without gradients sends its error-feedback residuals all the same. (With several scales the step is an
        error.)
        """
        assert self._user is not None
        if bucket.sync.has_error_feedback and not self.scales:
            self.scales.add(self._user.loss_scale)
        return next(iter(self.scales), 1.0)

    # -------------------------------------------------------------- at the step

    def drain(self) -> None:
        """Wait for all launched reductions; the current stream may read the shards afterwards."""
        with span("wait for reduce"):
            self._launched.wait()

    def leftovers(self) -> list[bool]:
        """Return for each bucket whether it has gradients on this rank that no reduce pass has reduced."""
        return [bucket.is_left_over for bucket in self.buckets]

    def launch(self, chosen: Sequence[bool]) -> None:
        """Reduce the chosen buckets (the same on every rank), in order, and begin a new reduce pass."""
        for bucket, wanted in zip(self.buckets, chosen, strict=True):
            if wanted:
                self._launch(bucket)
        self._begin_pass()

    def complete_unreduced(self) -> None:
        """Complete the gradients that need no reduction (on one rank).

        Raises:
            PartitaError: a gradient was changed since backward.
        """
        for bucket in self.buckets:
            if not bucket.buffer.collects:
                bucket.divide()
            elif not bucket.moves:
                bucket.fill_up()

    def add_copies(self) -> None:
        """Sum gradients over copies, when all reductions are complete.

        Buckets with copies on other pipeline stages come first, ordered by name: stages have different unit orders.
        """
        chosen = [bucket for bucket in self.buckets if not bucket.has_all_copies]
        tied = sorted((b for b in chosen if b.plan.copies.is_tied), key=lambda bucket: bucket.members[0].fqn)
        ordered = [*tied, *(bucket for bucket in chosen if not bucket.plan.copies.is_tied)]
        for bucket in ordered:
            slot = self.pools.scratch([bucket])
            received = self.pools.scratch_of(slot, bucket)
            awaited = [record(self._device)] + ([] if slot is None else [slot.last_use])
            self._launched = self._stream.run(partial(after, awaited, bucket.add_copies, self._interpreter, received))
            self.pools.release_scratch(slot, self._launched)
        self.drain()

    def gather(self, used: AbstractSet[int], factor: float, *, scale: float = 1.0) -> None:
        """All-gather reduced gradients for an optimizer that needs them unsharded, and averages that all ranks keep.

        Args:
            used: ids of the members that got a gradient on any rank.
            factor: the factor that the sums were multiplied by.
            scale: the divisor that turns them into the gradients that the optimizer gets.
        """
        chosen = [bucket for bucket in self.buckets if bucket.sync.gathers]
        slot = self.pools.scratch(chosen)
        awaited = [record(self._device)] + ([] if slot is None else [slot.last_use])

        def run() -> None:
            for bucket in chosen:
                received = None if slot is None else over(slot.storage, torch.uint8, slot.num_bytes)
                bucket.gather(SyncCall(self._seeded(), received), used, factor, scale)

        if chosen:
            gathered = self._stream.run(partial(after, awaited, run))
            self.pools.release_scratch(slot, gathered)
            with span("wait for reduce"):
                gathered.wait()

    def zero(self) -> None:
        """Drop all gradients. Buffers that the table stores keep their memory for the next step."""
        self._remove_placeholders()
        self.finite.clear()
        self._reduce_pass.task = None
        self._reduce_pass.next = self._num_seeds = 0
        self.scales.clear()
        for bucket in self.buckets:
            if (slot := bucket.clear()) is not None:
                self.pools.release_sent(slot, record(self._device))
