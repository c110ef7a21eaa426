"""Gradients on their way: collected as backward produces them, reduced in one order fixed when the plan is made.

A *wave* reduces every bucket once, in order: a bucket is launched as soon as it has all it expects and every earlier
one is launched, and when the backward ends the rest follow, with zeros for what did not come. So ranks may run
different modules (or none) and still meet in the same reductions. What arrives after its bucket was launched waits for
the next wave; what is left when the step ends is agreed on by all ranks and reduced then.
"""

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from partita.comm.collectives import Collectives
from partita.errors import PartitaError
from partita.memory.allocate import over
from partita.memory.ledger import Ledger
from partita.memory.streams import Event, after, record
from partita.memory.timeline import span, told
from partita.sharding.buckets import Bucket
from partita.sharding.finite import FiniteWatch
from partita.sharding.gradient_pools import GradientPools
from partita.sharding.gradient_sync import SyncCall
from partita.sharding.gradient_user import GradientUser
from partita.sharding.interpreter import Interpreter
from partita.sharding.scaled import factor_under_way
from partita.sharding.sync_states import SyncStates
from partita.sharding.unit import Member


@dataclass
class _Wave:
    """``next``: the first bucket, in order, that it has not launched; ``task``: autograd's number of the backward under
    way; ``took_part``: this micro-batch has brought a gradient, or has joined the others.
    """

    next: int = 0
    task: int | None = None
    took_part: bool = False


class GradientReducer:
    """Collects and reduces the gradients of all buckets: their mean over the ranks and the micro-batches of a step.

    Attributes: ``scales``: what the losses of this rank's gradients since the last update were multiplied by;
    ``covered``: members whose gradients of a complete batch were collected; ``waves``: how many have ended;
    ``sync_states``: what is kept of all buckets between steps; ``finite`` watches losses and gradients.
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
        self._wave = _Wave()
        self._is_last_micro_batch = True
        self._synchronizes = True
        self._user: GradientUser | None = None
        self.aside: Callable[[nn.Parameter, Tensor], None] | None = None
        self.scales = set[float]()
        self.covered = list[Member]()
        self.waves = 0
        self._num_seeds = 0  # since the last update

    def connect(self, user: GradientUser) -> None:
        """Have ``user`` use the gradients; called once, before the first backward."""
        self._user = user

    def add(self, bucket: Bucket) -> None:
        """Take up the bucket of a segment that begins to train; it is reduced last."""
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
        """From the next step on gradients are summed as in the warm-up, or as later."""
        self._is_warming_up = is_warming_up
        for bucket in self.buckets:
            bucket.warm_up(is_warming_up)

    def bucket_of(self, member: Member) -> Bucket | None:
        """The bucket of a member that trains."""
        return self._bucket_of.get(id(member))

    # -------------------------------------------------------------- what a wave does

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Gradients that rest whole are reduced as the backward of a step's last micro-batch brings them."""
        self._is_last_micro_batch = is_last

    @property
    def holds_batch(self) -> bool:
        """True if this rank has gradients of a step's last micro-batch."""
        return self._is_last_micro_batch and any(bucket.arrivals.used for bucket in self.buckets)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients stay with their parameters, whole."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    def _reducing(self, bucket: Bucket) -> bool:
        """Return whether this backward reduces the bucket."""
        return bucket.moves and self._synchronizes and (self._is_last_micro_batch or bucket.passes)

    # ---------------------------------------------------------------- in backward

    def backward_began(self) -> None:
        """A gradient reached the model's output: the wave ends with this backward (once a backward)."""
        task = torch._C._current_graph_task_id()
        if task != -1 and self._wave.task is None:
            assert self._user is not None
            self._wave.task = task
            self._user.begin()
            self._uncover()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def arrived(self, member: Member) -> None:
        """A parameter's gradient is in its ``.grad``.

        Raises:
            PartitaError: the gradient is sparse.
        """
        if self.covered:
            member.uncover()
        grad = member.param.grad
        if grad is not None and grad.layout is not torch.strided:
            raise PartitaError(
                f"the gradient of '{member.fqn}' is sparse ({grad.layout}), and gradients are held dense: build the "
                "module with sparse=False"
            )
        bucket = self._bucket_of[id(member)]
        if self.aside is not None and grad is not None and bucket.buffer.collects:
            member.param.grad = None
            self.aside(member.param, grad)
            return
        self._wave.took_part = True
        self.scales.add(factor_under_way())
        in_wave = bucket.buffer.collects and (self._synchronizes or bucket.buffer.keeps_full)
        if in_wave:
            self.backward_began()
        bucket.note(member, in_wave=in_wave)
        if not in_wave:
            return
        if bucket.buffer.keeps_full:
            bucket.reopen()
            bucket.collect(member)
        elif self._order[self._wave.next :][:1] == [bucket]:
            self.pools.lend(bucket)
            bucket.collect(member)
        if self._reducing(bucket):
            self._launch_complete()

    def _end_backward(self) -> None:
        self._wave.task = None
        if any(bucket.arrivals.fresh for bucket in self.buckets):
            self.end_wave()

    def _launch_complete(self) -> None:
        while self._wave.next < len(self._order) and self._order[self._wave.next].arrivals.is_complete:
            self._launch(self._order[self._wave.next])
            self._wave.next += 1

    def release_held_back(self) -> None:
        """The others do not answer; they may wait for a bucket that this rank holds back for gradients that do not
        come.

        A sign of that is a later bucket that is complete. What still comes is reduced at the step.
        """
        later = self._order[self._wave.next + 1 :]
        if self._wave.task is not None and any(
            bucket.arrivals.is_complete and self._reducing(bucket) for bucket in later
        ):
            self._launch(self._order[self._wave.next])
            self._wave.next += 1
            self._launch_complete()

    def join(self) -> None:
        """A micro-batch that brought this rank no gradient: join the others' reductions, with zeros."""
        if not self._wave.took_part:
            self.end_wave()
        self._wave.took_part = True

    def end_micro_batch(self) -> None:
        """This rank has come to the end of a micro-batch."""
        self.join()
        self._wave.took_part = False

    def end_wave(self) -> None:
        """Launch what this wave has not launched yet, with zeros for what did not come."""
        if self._order and self._reducing(self._order[0]):
            for bucket in self._order[self._wave.next :]:
                self._launch(bucket)
            self.waves += 1
            self._wave.took_part = True
        self._begin_wave()
        if self._is_last_micro_batch:
            self._cover()

    def _begin_wave(self) -> None:
        for bucket in self.buckets:
            bucket.arrivals.end_wave()
        self._wave.next = 0

    def _cover(self) -> None:
        """A batch's gradients were collected: say so where the user may look for them."""
        self.covered = [m for b in self.buckets if b.buffer.collects for m in b.members if id(m) in b.arrivals.used]
        with torch._C.DisableTorchFunctionSubclass():
            for member in self.covered:
                member.cover()

    def _uncover(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for member in self.covered:
                member.uncover()
        self.covered.clear()

    # ------------------------------------------------------------- one reduction

    def _launch(self, bucket: Bucket) -> None:
        """Queue a bucket's reduction, with zeros for what did not come."""
        if bucket.buffer.keeps_full:
            bucket.reopen()
        else:
            self.pools.lend(bucket)
        bucket.fill_up()
        if self.finite.traces:
            self.finite.watch(bucket.buffer.total())
        scratch, sums = self.pools.scratch([bucket]), self.pools.for_sum(bucket)
        call = SyncCall(self._seeded(), self.pools.in_slot(scratch, bucket))
        reduce = bucket.launch(call, sums, self._scale_of(bucket))
        awaited = [record(self._device), *(slot.last_use for slot in (scratch, sums) if slot is not None)]
        self._launched = self._stream.run(told(partial(after, awaited, reduce), "reduce", bucket.members[0].fqn))
        self.pools.give_back_scratch(scratch, self._launched)
        if (sent := bucket.launched(self._launched)) is not None:
            self.pools.take_back(sent, self._launched)
        if sums is not None:
            assert self._user is not None
            self.pools.give_back_sum(sums, bucket, self._user.use(bucket))

    def _seeded(self) -> Interpreter:
        """With random numbers of its own, which depend on nothing but the step and the order within it."""
        assert self._user is not None
        self._num_seeds += 1
        return self._interpreter.seeded(self._user.steps, self._num_seeds)

    def _scale_of(self, bucket: Bucket) -> float:
        """What the bucket's gradients are multiplied by. A rank that has none sends the errors that it keeps all the
        same. (Where there are several factors, the step is an error.)
        """
        assert self._user is not None
        if bucket.sync.keeps_errors and not self.scales:
            self.scales.add(self._user.loss_scale)
        return next(iter(self.scales), 1.0)

    # -------------------------------------------------------------- at the step

    def drain(self) -> None:
        """Wait for every reduction under way; the current stream may read the shards afterwards."""
        with span("wait for reduce"):
            self._launched.wait()

    def leftovers(self) -> list[bool]:
        """For each bucket, whether this rank holds gradients that no wave has taken."""
        return [bucket.is_left_over for bucket in self.buckets]

    def launch(self, chosen: Sequence[bool]) -> None:
        """Reduce the chosen buckets (the same on every rank), in order, and end the wave."""
        for bucket, wanted in zip(self.buckets, chosen, strict=True):
            if wanted:
                self._launch(bucket)
        self._begin_wave()

    def complete_unreduced(self) -> None:
        """Complete the gradients that need no reduction (there are no other ranks).

        Raises:
            PartitaError: one was changed since backward.
        """
        for bucket in self.buckets:
            if not bucket.buffer.collects:
                bucket.divide()
            elif not bucket.moves:
                bucket.fill_up()

    def add_copies(self) -> None:
        """Once all else is reduced: the sums over the ranks that have copies. What other stages have comes first, by
        name: no order of units is that of all stages.
        """
        chosen = [bucket for bucket in self.buckets if not bucket.has_all_copies]
        tied = sorted((b for b in chosen if b.plan.copies.is_tied), key=lambda bucket: bucket.members[0].fqn)
        ordered = [*tied, *(bucket for bucket in chosen if not bucket.plan.copies.is_tied)]
        for bucket in ordered:
            slot = self.pools.scratch([bucket])
            received = self.pools.in_slot(slot, bucket)
            awaited = [record(self._device)] + ([] if slot is None else [slot.last_use])
            self._launched = self._stream.run(partial(after, awaited, bucket.add_copies, self._interpreter, received))
            self.pools.give_back_scratch(slot, self._launched)
        self.drain()

    def gather(self, used: AbstractSet[int], factor: float) -> None:
        """Gather sums where the optimizer works on whole gradients, and running averages where all ranks have them, of
        what any rank has ``used``; ``factor``: what sums were multiplied by.
        """
        chosen = [bucket for bucket in self.buckets if bucket.sync.gathers]
        slot = self.pools.scratch(chosen)
        awaited = [record(self._device)] + ([] if slot is None else [slot.last_use])

        def run() -> None:
            for bucket in chosen:
                received = None if slot is None else over(slot.storage, torch.uint8, slot.num_bytes)
                bucket.gather(SyncCall(self._seeded(), received), used, factor)

        if chosen:
            gathered = self._stream.run(partial(after, awaited, run))
            self.pools.give_back_scratch(slot, gathered)
            with span("wait for reduce"):
                gathered.wait()

    def zero(self) -> None:
        """Forget all gradients; their memory is kept for the next step where the table says that it rests."""
        self._uncover()
        self.finite.clear()
        self._wave.task = None
        self._wave.next = self._num_seeds = 0
        self.scales.clear()
        for bucket in self.buckets:
            if (slot := bucket.clear()) is not None:
                self.pools.take_back(slot, record(self._device))
