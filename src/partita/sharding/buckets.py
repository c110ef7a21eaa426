"""Gradient buckets: one large or several small segments whose gradients are collected and reduced together.

The row of the table chooses the objects that a bucket consists of: the buffer in which gradients are collected
(:mod:`partita.sharding.gradient_buffer`), the sync that sums them over the ranks
(:mod:`partita.sharding.gradient_sync`) and the sum over copies (:class:`SumOfCopies`). :class:`Arrivals` records which
gradients have arrived.
"""

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

from partita.errors import PartitaError
from partita.layout.dtypes import dtype_of
from partita.memory import accelerator
from partita.memory.buffer_pool import Slot
from partita.memory.ledger import Ledger
from partita.memory.streams import Event
from partita.memory.tiers import StateMemory, StoredState
from partita.sharding.gradient_buffer import BucketLayout, InPlaceBuffer, PooledBuffer, make_buffer
from partita.sharding.gradient_sync import GradientSync, SyncCall, make_syncs
from partita.sharding.interpreter import Interpreter
from partita.sharding.parameter import Member
from partita.sharding.segment import Segment
from partita.sharding.squared_norm import square, total_squared_norm
from partita.table.planned_gradients import PlannedGradients
from partita.table.residence import Tier
from partita.table.state_plan import StatePlan


class Arrivals:
    """Records which members' gradients have arrived, by the members' ids.

    Attributes:
        used: members that got a gradient since the last update.
        buffered: members whose gradients are in the buffer.
        fresh: members that got a gradient in this reduce pass.
    """

    def __init__(self, members: Iterable[Member]) -> None:
        self.used = set[int]()
        self.buffered = set[int]()
        self.fresh = set[int]()
        self._previous = set[int]()  # in the last reduce pass
        self._expected: AbstractSet[int] = {id(member) for member in members}  # learned from the last two reduce passes

    @property
    def is_complete(self) -> bool:
        """True if every expected gradient has arrived in this reduce pass."""
        return self._expected <= self.fresh

    def has_buffered(self, member: Member) -> bool:
        """Return whether the buffer has a gradient of the member."""
        return id(member) in self.buffered

    def note(self, member: Member, *, in_pass: bool) -> None:
        """Record a gradient. ``in_pass``: it is reduced in the current reduce pass."""
        self.used.add(id(member))
        if in_pass:
            self.fresh.add(id(member))

    def collect(self, member: Member) -> None:
        """Record that a gradient was moved into the buffer."""
        self.buffered.add(id(member))
        self.used.add(id(member))

    def launched(self, *, learns: bool) -> None:
        """Note that the collected gradients are being reduced. ``learns``: expect the same in the next passes."""
        if learns:
            self._expected = self.fresh | self._previous or self._expected
        self._previous = set(self.fresh)
        self.buffered.clear()

    def end_pass(self) -> None:
        """Begin another reduce pass."""
        self.fresh.clear()

    def clear(self) -> None:
        """Forget all gradients: they were dropped, or used by an update."""
        self.buffered.clear()
        self.fresh.clear()
        self.used.clear()


class SumOfCopies:
    """The sum of gradients over all copies of parameters, by ``steps``.

    ``factor`` turns the sum into the mean if the copies' gradients are equal.
    """

    def __init__(self, planned: PlannedGradients) -> None:
        self.steps = planned.copy_steps
        self.factor = planned.copy_factor

    def run(self, shard: Tensor, interpreter: Interpreter, scratch: Tensor | None) -> None:
        """Replace ``shard`` by the sum. A collective of the ranks that have copies.

        Args:
            scratch: scratch memory for the steps.
        """
        values = shard.to(interpreter.device)
        interpreter.run(self.steps, values, values, purpose="gradients", scratch=scratch)
        values.mul_(self.factor)
        if values is not shard:
            shard.copy_(values)


class BucketState(Enum):
    OPEN = "open"  # gradients can be collected
    REDUCED = "reduced"  # launched: the shard has the sum once the event has passed; in place: gradients are means


class Bucket:
    """Segments whose gradients are collected and reduced together.

    Attributes:
        buffer: the buffer in which they are collected.
        syncs: the sums over the ranks: in the warm-up (if there is one), and later.
        copies: the sum over all copies.
        arrivals: the gradients that have arrived.
        divisor: ranks times micro-batches.
        has_all_copies: True once the sum over copies is complete.
    """

    def __init__(self, layout: BucketLayout, accumulate: int, ledger: Ledger) -> None:
        self.layout = layout
        self.buffer = make_buffer(layout, ledger)
        self.syncs = list[GradientSync]()
        self.copies = SumOfCopies(layout.planned.gradients)
        self.arrivals = Arrivals(layout.members)
        self.divisor = layout.planned.mesh.group_size(self.plan.mean_axes) * accumulate
        self.has_all_copies = not self.copies.steps
        self._ledger = ledger
        self._is_warming_up = False
        self._state = BucketState.OPEN
        self._reduced = Event()
        self._squared_norms = list[Tensor]()

    # ------------------------------------------------------------------ as planned

    @property
    def segments(self) -> Sequence[Segment]:
        return self.layout.segments

    @property
    def members(self) -> Sequence[Member]:
        return self.layout.members

    @property
    def plan(self) -> StatePlan:
        """The row of the table that the segments share."""
        return self.layout.planned.row

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype in which gradients are collected and summed."""
        return dtype_of(self.plan.grad_step.encoding)

    @property
    def num_bytes(self) -> int:
        return self.layout.num_elements * self.dtype.itemsize

    @property
    def shard_bytes(self) -> int:
        return self.layout.num_columns * self.dtype.itemsize

    @property
    def is_pooled(self) -> bool:
        """True if each backward collects gradients in a slot of a buffer pool."""
        return isinstance(self.buffer, PooledBuffer)

    @cached_property
    def moves(self) -> bool:
        """True if gradients are moved out of the memory in which they are collected."""
        return self.is_pooled or bool(self.layout.planned.gradients.reductions)

    @property
    def sums_tier(self) -> Tier | None:
        """The tier of the buffer pool for reduced gradients; None if reduced gradients are stored."""
        return self.layout.planned.gradients.sums_tier

    @property
    def is_measured(self) -> bool:
        """True if this rank adds its shard to the gradient norm."""
        return self.layout.is_measured

    # ------------------------------------------------------------------------ now

    @property
    def shard(self) -> StoredState | None:
        """This rank's shard of the reduced gradients. :meth:`clear` leaves its values (see :meth:`has_earlier_sum`)."""
        return self.buffer.shard

    @property
    def sync(self) -> GradientSync:
        """The sync of the current phase."""
        return self.syncs[0 if self._is_warming_up else -1]

    def warm_up(self, is_warming_up: bool) -> None:
        """Select the sync: the one for the warm-up, or the one for later steps."""
        self._is_warming_up = is_warming_up

    def has_earlier_sum(self) -> bool:
        """Return whether :attr:`shard` has the sum of an earlier batch: in this one no gradients were reduced."""
        return self.moves and self._state is BucketState.OPEN

    @property
    def is_left_over(self) -> bool:
        """True if some gradients were not reduced by any reduce pass."""
        return self.moves and (bool(self.arrivals.buffered) or bool(self.members_with_grad))

    @property
    def members_with_grad(self) -> list[Member]:
        """Members whose gradients are still in ``.grad``."""
        with torch._C.DisableTorchFunctionSubclass():  # sharded parameters answer through Python
            return [member for member in self.layout.members if member.grad is not None]

    # ---------------------------------------------------------------- collecting

    def allocate(self, memory: StateMemory) -> None:
        """Allocate the gradients that are stored here, and the states of their sync."""
        if not self.syncs:
            self.syncs = make_syncs(self.layout, memory)
        self.buffer.allocate(memory)

    def note(self, member: Member, *, in_pass: bool) -> None:
        """Record a member's gradient. ``in_pass``: it is reduced in the current reduce pass."""
        self.arrivals.note(member, in_pass=in_pass)
        self.buffer.note(member)

    def collect(self, member: Member) -> None:
        """Divide a parameter's gradient and move it into the buffer: copy the first one, add later ones."""
        grad, full = member.grad, self.buffer.full
        if grad is None:
            return
        assert full is not None
        flat, first = member.flat(grad.detach()), not self.arrivals.has_buffered(member)
        for piece in self.layout.pieces[id(member)]:
            target, source = piece.of(full[piece.row]), flat[piece.start : piece.stop]
            if not first:
                target.add_(source, alpha=1.0 / self.divisor)
            elif self.divisor == 1:
                target.copy_(source)
            elif target.dtype == source.dtype:
                torch.mul(source, 1.0 / self.divisor, out=target)
            else:
                target.copy_(source).mul_(1.0 / self.divisor)
        self.arrivals.collect(member)
        member.param.grad = None

    def fill_up(self) -> None:
        """Collect the remaining gradients from ``.grad``, and write zeros where no gradient arrived."""
        for member in self.members_with_grad:
            self.collect(member)
        full = self.buffer.full
        assert full is not None
        if self.buffer.keeps_full and not all(sync.is_exact for sync in self.syncs):
            self.layout.clear_gaps(full)  # non-finite values of an encoded block spread into the padding
        for piece in (piece for ps in self.layout.pieces_of_unused(self.arrivals.buffered) for piece in ps):
            piece.of(full[piece.row]).zero_()

    def divide(self) -> None:
        """Change from OPEN to REDUCED in place: turn sums over the micro-batches into means.

        Raises:
            PartitaError: a gradient was changed since backward.
        """
        assert isinstance(self.buffer, InPlaceBuffer)
        self.buffer.divide(self.members_with_grad, self.divisor)
        self._state = BucketState.REDUCED

    def reopen(self) -> None:
        """Change from REDUCED to OPEN if more gradients are added to a full buffer: keep this rank's sum separately."""
        if self._state is BucketState.REDUCED:
            self.buffer.reopen(self._reduced)
            self._state = BucketState.OPEN

    # ------------------------------------------------------------------ reducing

    def launch(self, call: SyncCall, sums: Slot | None, scale: float) -> Callable[[], None]:
        """Return the function that reduces the collected gradients into ``shard``; it runs on another stream.

        Args:
            sums: the slot for the sum, if reduced gradients are not stored.
            scale: the loss scale of the gradients.
        """
        buffer = self.buffer
        if sums is not None:
            assert isinstance(buffer, PooledBuffer)
            buffer.borrow_for_sum(sums)
        assert buffer.full is not None
        assert buffer.shard is not None
        sent, kept, previous_sum = buffer.full.view(-1), buffer.shard, buffer.previous_sum
        adds = self._state is BucketState.REDUCED and sums is None
        sync = self.sync
        self._squared_norms = norms = list[Tensor]()

        def reduce() -> None:
            replaces = call.scratch is None and not adds and previous_sum is None
            if replaces and (writing := kept.write_from(sent)) is not None:
                norms.extend(self._measure(sent))
                with suppress(PartitaError):  # the next read raises the error
                    writing.wait()
                return
            lease = kept.lease(read=adds)
            shard = total = lease.wait()
            leaves = kept.tier is not Tier.DEVICE and not accelerator.is_host(sent.device)
            if leaves:
                self._ledger.add("sums", shard.nbytes)
            if shard.device != sent.device:  # the device sums and measures, then the sum is copied
                total = torch.empty_like(shard, device=sent.device)
                if adds:
                    total.copy_(shard, non_blocking=True)
            sync.reduce(sent, total, call, add=adds, scale=scale)
            if previous_sum is not None:
                total.add_(previous_sum)
            if sums is not None and self.copies.steps:  # used before the step
                self.copies.run(total, call.interpreter, call.scratch)
            if kept.tier is not Tier.DEVICE:
                norms.extend(self._measure(total))
            if total is not shard:
                shard.copy_(total, non_blocking=True)
            if leaves:
                self._ledger.remove("sums", shard.nbytes)
            lease.end(changed=True)

        return reduce

    def launched(self, reduced: Event) -> Slot | None:
        """Change to REDUCED: ``shard`` has the sum when ``reduced`` has passed. Returns the slot that is free then."""
        # If gradients are not stored, a late gradient has no memory to wait in: never expect fewer.
        self.arrivals.launched(learns=self.plan.stores_gradients)
        self._reduced = reduced
        self._state = BucketState.REDUCED
        return self.buffer.release()

    def add_copies(self, interpreter: Interpreter, scratch: Tensor | None) -> None:
        """Sum ``shard`` over the copies, when it is complete on each rank."""
        self._change(lambda shard: self.copies.run(shard, interpreter, scratch))
        self.has_all_copies = True

    def drop(self, dropped: AbstractSet[int]) -> None:
        """Zero this rank's slices of the sums of ``dropped`` members (by id)."""
        of_members = (self.layout.pieces[id(member)] for member in self.layout.members if id(member) in dropped)
        pieces = [piece for each in of_members for piece in each if piece.row == self.layout.row]

        def clear(shard: Tensor) -> None:
            for piece in pieces:
                piece.of(shard).zero_()

        if pieces and self.shard is not None:
            self._change(clear)

    def drop_unused(self, used: AbstractSet[int]) -> None:
        """Zero this rank's slices of the sums of members that are not ``used`` (by id) on any rank."""
        if (unused := self.layout.pieces_of_unused(used)) and self.shard is not None:
            self._change(lambda shard: self.syncs[-1].drop_unused(shard, unused))

    def _change(self, change: Callable[[Tensor], None]) -> None:
        """Change the sum, and measure it again if it is not on the device."""
        assert self.shard is not None
        lease = self.shard.lease()
        change(lease.wait())
        if self.shard.tier is not Tier.DEVICE:
            self._squared_norms = self._measure(lease.tensor)
        lease.end(changed=True)

    def _measure(self, shard: Tensor) -> list[Tensor]:
        """Return the squared norms of sums that leave the device: one, or one per segment if they are not stored."""
        if not self.plan.stores_gradients:
            return [square(part) for part in shard.split([s.layout.shard_elements for s in self.layout.segments])]
        slices = self.norm_slices(shard, set(map(id, self.layout.members)))
        return [total_squared_norm(slices)] if slices else []

    def gather(self, call: SyncCall, used: AbstractSet[int], factor: float, scale: float) -> None:
        """All-gather the reduced gradients if the optimizer needs more than this rank's shard.

        Args:
            used: ids of the members that got a gradient on any rank.
            factor: the factor that this rank's shard was multiplied by.
            scale: the divisor that turns it into the gradients that the optimizer gets.
        """
        assert self.shard is not None
        shard, unused = self.shard.lease().wait(), self.layout.pieces_of_unused(used)
        self.sync.gather(shard, self.buffer.full, call, factor=factor, scale=scale, unused=unused)

    def clear(self) -> Slot | None:
        """Change to OPEN and drop all gradients. Returns the slot that is free now, if a backward did not end."""
        for member in self.members_with_grad:
            member.param.grad = None
        self.arrivals.clear()
        self.buffer.clear()
        for sync in self.syncs:
            sync.discard()
        self._state = BucketState.OPEN
        self.has_all_copies = not self.copies.steps
        return self.buffer.release()

    # ------------------------------------------------------------------- reduced

    @property
    def squared_norms(self) -> list[Tensor]:
        """The squared norms of a shard that is not on the device, measured before it left."""
        return self._squared_norms if self._state is BucketState.REDUCED else []

    def norm_slices(self, shard: Tensor, used: AbstractSet[int]) -> list[Tensor]:
        """Return the slices of the shard in which the norm is summed: one per segment, or, if this rank has all
        elements, one per ``used`` parameter (as for gradients in ``.grad``).
        """
        if self.layout.num_rows > 1:
            return list(shard.split([segment.layout.shard_elements for segment in self.layout.segments]))
        owned = (self.owned_slice(member, shard) for member in self.layout.members if id(member) in used)
        return [part for part in owned if part is not None]

    def owned_slice(self, member: Member, shard: Tensor | None) -> Tensor | None:
        """Return this rank's slice of a member's reduced gradient; None if it has no slice.

        ``shard``: the values of :attr:`shard`, if there is one.
        """
        if shard is None:
            return member.param.grad
        return next((piece.of(shard) for piece in self.layout.pieces[id(member)] if piece.row == self.layout.row), None)

    def optimizer_grad(self, member: Member, shard: Tensor | None) -> Tensor | None:
        """Return the gradient that the optimizer sees: this rank's slice, or the full gradient if it is not sharded."""
        sees_full = self.layout.planned.mesh.group_size(self.plan.grad_step.shard_axes) == 1
        if shard is None or not sees_full:
            return self.owned_slice(member, shard)
        full, offset = self.buffer.full, member.span.offset
        values = shard if full is None else full.view(-1)
        return member.shaped(values[offset : offset + member.span.num_elements])

    def gradient_term(self, member: Member, device: torch.device, *, is_first: bool) -> Tensor:
        """Return this rank's term of a member's mean gradient, ``[numel]`` in fp32. The ranks' terms add up to the
        gradient.

        The term is this rank's slice of the sums so far (if it ``is_first`` of the ranks with the same slice) plus the
        gradients that have arrived since.
        """
        values = torch.zeros(member.span.num_elements, dtype=torch.float32, device=device)
        is_reduced, full = self._state is BucketState.REDUCED, self.buffer.full
        sums = self.buffer.previous_sum
        if sums is None and is_reduced and self.plan.stores_gradients and self.shard is not None:
            sums = self.shard.load().to(device)
        for piece in self.layout.pieces[id(member)]:
            if is_first and piece.row == self.layout.row and sums is not None:
                values[piece.start : piece.stop] += piece.of(sums)
            if self.arrivals.has_buffered(member) and full is not None:
                values[piece.start : piece.stop] += piece.of(full[piece.row])
        if (grad := member.grad) is not None:
            is_mean = not self.buffer.collects and is_reduced
            values.add_(member.flat(grad.detach()).float(), alpha=1.0 if is_mean else 1.0 / self.divisor)
        return values
