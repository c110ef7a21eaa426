"""Gradients on their way: collected as backward produces them, reduced in one order fixed when the plan is made.

A *wave* reduces every bucket once, in order: a bucket is launched as soon as it has all it expects and every earlier
one is launched, and when the backward ends the rest follow, with zeros for what did not come. So ranks may run
different modules (or none) and still meet in the same reductions. What arrives after its bucket was launched waits for
the next wave; what is left when the step ends is agreed on by all ranks and reduced then.
"""

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from partita.comm.collectives import Collectives
from partita.comm.transport import land
from partita.errors import PartitaError
from partita.memory.allocate import over
from partita.memory.ledger import Ledger
from partita.memory.ring import Ring, Slot
from partita.memory.streams import Event, record
from partita.memory.tiers import InMemory
from partita.plan.residence import Tier
from partita.plan.slots import RECEIVING, SENDING, SUMMED
from partita.plan.steps import AllReduce
from partita.sharding.buckets import Bucket, BucketState, square
from partita.sharding.scaled import factor_under_way
from partita.sharding.unit import Member


class GradientReducer:
    """Collects and reduces the gradients of all buckets: their sum over the ranks and micro-batches, by ``divisor``.

    ``reduce_now`` says whether gradients that rest whole are to be reduced as this backward brings them (the last
    micro-batch); ``synchronize`` is off inside ``no_sync``, where gradients stay with their parameters, whole.
    ``suspect`` tells whether this rank's loss, or with ``trace`` on a gradient that it sent, was not finite since the
    last update, ``scales`` what the losses of this rank's gradients since then were multiplied by, ``covered`` whose
    gradients of a complete batch were collected. ``use`` is called with each bucket of gradients that rest nowhere,
    when its reduction is queued; its event passes when the sums are used up.
    """

    def __init__(self, buckets: list[Bucket], collectives: Collectives, ledger: Ledger, divisor: int) -> None:
        self.buckets, self.collectives, self._ledger = buckets, collectives, ledger
        self.divisor = divisor
        self._device = collectives.mesh.device
        self._bucket_of = {id(member): bucket for bucket in buckets for member in bucket.members}
        self._order = [bucket for bucket in buckets if bucket.travels]
        sent = [bucket.num_bytes for bucket in self._order if not bucket.rests_whole]
        received = [num_bytes for bucket in buckets if (num_bytes := self._received_bytes(bucket))]
        self._sending = Ring("buckets", sent, SENDING, ledger, self._device)
        self._receiving = Ring("buckets", received, RECEIVING, ledger, self._device)
        self._summed = {tier: self._ring_of_sums(tier) for tier in (Tier.DEVICE, Tier.HOST)}
        self._stream = collectives.mesh.stream("gradients")
        self._launched = Event()  # passes when everything launched so far is reduced
        self._next = 0
        self._task: int | None = None
        self._left_in_place = 0
        self.waves = 0
        self.reduce_now = True
        self.synchronize = True
        self.trace = False
        self.scales = set[float]()
        self.collected = False  # gradients that need no reduction are divided
        self._versions = dict[int, int]()  # of gradients in place, as backward left them
        self.before_backward: Callable[[], None] = lambda: None
        self.use: Callable[[Bucket], Event] = lambda bucket: Event()
        self._finite: Tensor | None = None
        self._took_part = False
        self.covered = list[Member]()

    def add(self, bucket: Bucket) -> None:
        """Take up the bucket of a segment that begins to train; it is reduced last."""
        self.buckets.append(bucket)
        self._bucket_of.update((id(member), bucket) for member in bucket.members)
        if bucket.travels:
            self._order.append(bucket)
            if received := self._received_bytes(bucket):
                self._receiving.provide(received, RECEIVING)
            if not bucket.rests_whole:
                self._sending.provide(bucket.num_bytes, SENDING)
            if not bucket.rests:
                self._summed[bucket.plan.grad_step.tier].provide(bucket.shard_bytes, SUMMED)

    def _ring_of_sums(self, tier: Tier) -> Ring:
        passing = [b.shard_bytes for b in self.buckets if not b.rests and b.plan.grad_step.tier is tier]
        return Ring("buckets", passing, SUMMED, self._ledger, self._device, tier=tier)

    def _received_bytes(self, bucket: Bucket) -> int:
        """Scratch memory that the bucket's reduction needs."""
        group, itemsize = self.collectives.group(bucket.axes), bucket.dtype.itemsize
        return group.received_elements(bucket.num_elements, itemsize) * itemsize

    # ---------------------------------------------------------------- in backward

    def watch(self, value: Tensor) -> None:
        """Remember whether a number of this rank's is finite, without waiting for it."""
        finite = value.detach().isfinite().all()
        self._finite = finite if self._finite is None else self._finite & finite

    @property
    def suspect(self) -> bool:
        """Whether a number that was watched since the last update is not finite."""
        return self._finite is not None and not bool(self._finite)

    def backward_began(self) -> None:
        """A gradient reached the model's output: the wave ends with this backward (once a backward)."""
        task = torch._C._current_graph_task_id()
        if task != -1 and self._task is None:
            self._task = task
            self.before_backward()
            self._uncover()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def arrived(self, member: Member) -> None:
        """A parameter's gradient is in its ``.grad``.

        Raises:
            PartitaError: the gradient is sparse.
        """
        member.uncover()
        grad = member.param.grad
        if grad is not None and grad.layout is not torch.strided:
            raise PartitaError(
                f"the gradient of '{member.fqn}' is sparse ({grad.layout}), and gradients are held dense: build the "
                "module with sparse=False"
            )
        self._took_part = True
        self.scales.add(factor_under_way())
        bucket = self._bucket_of[id(member)]
        if bucket.in_place and id(member) not in bucket.used and member.param.grad is not None:
            self._left_in_place += member.param.grad.nbytes
            self._ledger.add("gradients", member.param.grad.nbytes)
        bucket.used.add(id(member))
        if bucket.in_place and grad is not None:
            self._versions[id(member)] = grad._version
        if bucket.in_place or (not self.synchronize and not bucket.rests_whole):
            return
        self.backward_began()
        bucket.fresh.add(id(member))
        if bucket.rests_whole:
            self._reopen(bucket)
            bucket.absorb(member, self.divisor)
        elif self._order[self._next :][:1] == [bucket]:
            self._fill(bucket)
            bucket.absorb(member, self.divisor)
        if self._reducing(bucket):
            self._launch_ready()

    def _end_backward(self) -> None:
        self._task = None
        if any(bucket.fresh for bucket in self.buckets):
            self.end_wave()

    def _reducing(self, bucket: Bucket) -> bool:
        """Whether this backward reduces the bucket at all."""
        return bucket.travels and self.synchronize and (self.reduce_now or not bucket.rests_whole)

    def _waiting(self, bucket: Bucket) -> list[Member]:
        """Members whose gradients are still with their parameters."""
        with torch._C.DisableTorchFunctionSubclass():  # resting parameters answer through Python
            return [member for member in bucket.members if member.grad is not None]

    def _launch_ready(self) -> None:
        while self._next < len(self._order) and self._order[self._next].complete:
            self._launch(self._order[self._next])
            self._next += 1

    def release_held_back(self) -> None:
        """The others do not answer; they may wait for a bucket that this rank holds back for gradients that do not
        come.

        A sign of that is a later bucket that is complete. What still comes is reduced at the step.
        """
        later = self._order[self._next + 1 :]
        if self._task is not None and any(bucket.complete and self._reducing(bucket) for bucket in later):
            self._launch(self._order[self._next])
            self._next += 1
            self._launch_ready()

    def join(self) -> None:
        """A micro-batch that brought this rank no gradient: join the others' reductions, with zeros."""
        if not self._took_part:
            self.end_wave()
        self._took_part = True

    def end_micro_batch(self) -> None:
        """This rank has come to the end of a micro-batch."""
        self.join()
        self._took_part = False

    def end_wave(self) -> None:
        """Launch what this wave has not launched yet, with zeros for what did not come."""
        if self._order and self._reducing(self._order[0]):
            for bucket in self._order[self._next :]:
                self._launch(bucket)
            self.waves += 1
            self._took_part = True
        for bucket in self.buckets:
            bucket.fresh.clear()
        self._next = 0
        if self.reduce_now:
            self._cover()

    def _cover(self) -> None:
        """A batch's gradients were collected: say so where the user may look for them."""
        self.covered = [m for b in self.buckets if not b.in_place for m in b.members if id(m) in b.used]
        with torch._C.DisableTorchFunctionSubclass():
            for member in self.covered:
                member.cover()

    def _uncover(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for member in self.covered:
                member.uncover()
        self.covered.clear()

    # ------------------------------------------------------------- one reduction

    def _fill(self, bucket: Bucket) -> None:
        """Give a bucket memory to collect in."""
        if bucket.whole is None:
            bucket.slot = self._sending.borrow(bucket.num_bytes)
            bucket.slot.last_use.wait()
            bucket.whole = over(bucket.slot.storage, bucket.dtype, bucket.num_elements).view(bucket.num_rows, -1)
            bucket.clear_gaps()

    def _reopen(self, bucket: Bucket) -> None:
        """A gradient that rests whole takes more after it was reduced: put this rank's sum aside."""
        if bucket.state is BucketState.REDUCED:
            assert bucket.shard is not None
            bucket.reduced_at.wait()
            bucket.carry = bucket.shard.load()
            self._ledger.add("gradients", bucket.carry.nbytes)
            bucket.state = BucketState.OPEN

    def _launch(self, bucket: Bucket) -> None:
        """Queue a bucket's reduction, with zeros for what did not come."""
        if bucket.rests_whole:
            self._reopen(bucket)
        else:
            self._fill(bucket)
        for member in self._waiting(bucket):
            bucket.absorb(member, self.divisor)
        for member in bucket.members:
            if id(member) not in bucket.arrived:
                bucket.clear(member)
        assert bucket.whole is not None
        if self.trace:
            self.watch(bucket.whole.sum(dtype=torch.float32))
        num_bytes = self._received_bytes(bucket)
        receiving = self._receiving.borrow(num_bytes) if num_bytes else None
        summed = self._summed[bucket.plan.grad_step.tier].borrow(bucket.shard_bytes) if not bucket.rests else None
        if summed is not None:
            bucket.shard = InMemory(over(summed.storage, bucket.dtype, bucket.columns), bucket.plan.grad_step.tier)
        lent = [slot.last_use for slot in (receiving, summed) if slot is not None]
        bucket.reduced_at = self._launched = self._stream.run(self._reduction(bucket, receiving, lent))
        if receiving is not None:
            self._receiving.give_back(receiving, self._launched)
        if bucket.slot is not None:
            self._sending.give_back(bucket.slot, self._launched)
            bucket.slot = bucket.whole = None
        if bucket.carry is not None:
            self._ledger.remove("gradients", bucket.carry.nbytes)
            bucket.carry = None
        if bucket.rests:  # where it does not, what came too late would have no place to wait
            bucket.expected = bucket.fresh | bucket.previously or bucket.expected
        bucket.previously = set(bucket.fresh)
        bucket.arrived.clear()
        bucket.filled, bucket.state = bucket.rests, BucketState.REDUCED
        if summed is not None:
            self._summed[bucket.plan.grad_step.tier].give_back(summed, self.use(bucket))

    def _reduction(self, bucket: Bucket, receiving: Slot | None, lent: Sequence[Event]) -> Callable[[], None]:
        """What brings the sum of a bucket, as it is now, into its shard; beside the current stream's work.

        ``lent``: the last uses of the slots that it writes.
        """
        assert bucket.whole is not None
        assert bucket.shard is not None
        sent, kept, carry, filled = bucket.whole.view(-1), bucket.shard, bucket.carry, record(self._device)
        accumulate = bucket.filled and not bucket.rests_whole
        used, group = frozenset(bucket.used), self.collectives.group(bucket.axes)

        def reduce() -> None:
            for event in (filled, *lent):
                event.wait()
            replaces = receiving is None and not accumulate and carry is None
            if replaces and (writing := kept.write_from(sent)) is not None:
                bucket.squares = [square(part) for part in bucket.parts(sent, used)]
                with contextlib.suppress(PartitaError):  # whoever reads it is told
                    writing.wait()
                return
            lease = kept.lend(read=accumulate)
            shard = lease.wait()
            if receiving is None:
                land(sent, shard, accumulate=accumulate)
            else:
                received = over(receiving.storage, bucket.dtype, self._received_bytes(bucket) // bucket.dtype.itemsize)
                group.reduce_scatter(shard, sent, received, accumulate=accumulate)
            if carry is not None:
                shard.add_(carry)
            if kept.tier is Tier.DISK:  # so that nobody has to read it for the norm
                bucket.squares = [square(part) for part in bucket.parts(shard, used)]
            lease.end(changed=True)

        return reduce

    # -------------------------------------------------------------- at the step

    def drain(self) -> None:
        """Wait for every reduction under way; the current stream may read the shards afterwards."""
        self._launched.wait()

    def leftovers(self) -> list[bool]:
        """For each bucket, whether this rank holds gradients that no wave has taken."""
        return [bucket.travels and (bool(bucket.arrived) or bool(self._waiting(bucket))) for bucket in self.buckets]

    def launch(self, chosen: Sequence[bool]) -> None:
        """Reduce the chosen buckets (the same on every rank), in order, and end the wave."""
        for bucket, wanted in zip(self.buckets, chosen, strict=True):
            if wanted:
                self._launch(bucket)
            bucket.fresh.clear()
        self._next = 0

    def collect_unreduced(self) -> None:
        """Complete the gradients that need no reduction (there are no other ranks).

        Raises:
            PartitaError: one was changed since backward.
        """
        self.collected = True
        for bucket in self.buckets:
            if bucket.in_place:
                for member in self._waiting(bucket):
                    assert member.param.grad is not None
                    self._check_untouched(member, member.param.grad)
                    if self.divisor != 1:
                        member.param.grad.mul_(1.0 / self.divisor)
            elif bucket.rests_whole and not bucket.travels:
                for member in bucket.members:
                    bucket.absorb(member, self.divisor)
                    if id(member) not in bucket.arrived:
                        bucket.clear(member)

    def _check_untouched(self, member: Member, grad: Tensor) -> None:
        if self._versions.get(id(member), grad._version) != grad._version:
            raise PartitaError(
                f"the .grad of '{member.fqn}' was changed between backward and step (by "
                "torch.nn.utils.clip_grad_norm_?): on several ranks, and in other precisions, there is none to change. "
                "Set clip_grad_norm in the config, or call engine.clip_grad_norm(max_norm) before engine.step()"
            )

    def spread(self) -> None:
        """Gather the sums where the optimizer works on whole gradients."""
        ready = record(self._device)
        chosen = [bucket for bucket in self.buckets if any(isinstance(op, AllReduce) for op in bucket.reduces)]

        def gather() -> None:
            ready.wait()
            for bucket in chosen:
                assert bucket.whole is not None
                group = self.collectives.group(bucket.axes)
                group.all_gather(bucket.whole.view(-1), bucket.whole[group.index], "gradients").wait()

        if chosen:
            self._stream.run(gather).wait()

    def _abandon(self, bucket: Bucket) -> None:
        """Let go of what a backward that did not end has left in a bucket."""
        if bucket.slot is not None:
            self._sending.give_back(bucket.slot, record(self._device))
            bucket.slot = bucket.whole = None
        if bucket.carry is not None:
            self._ledger.remove("gradients", bucket.carry.nbytes)
            bucket.carry = None

    def zero(self) -> None:
        """Forget all gradients; their memory is kept for the next step where the table says that it rests."""
        self._uncover()
        self._finite, self._task, self._next = None, None, 0
        self.scales.clear()
        self._versions.clear()
        self.collected = False
        self._ledger.remove("gradients", self._left_in_place)
        self._left_in_place = 0
        for bucket in self.buckets:
            for member in self._waiting(bucket):
                member.param.grad = None
            self._abandon(bucket)
            bucket.arrived.clear()
            bucket.fresh.clear()
            bucket.used.clear()
            bucket.filled, bucket.state = False, BucketState.OPEN
