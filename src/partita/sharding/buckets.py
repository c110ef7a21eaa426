"""Gradient buckets: one large or several small segments whose gradients are collected and reduced together.

A bucket is put together from objects that the row of the table chooses: the buffer in which gradients are collected
(:mod:`partita.sharding.gradient_buffer`), the sync that sums them over the ranks
(:mod:`partita.sharding.gradient_sync`) and the sum over copies (:class:`SumOfCopies`). :class:`Arrivals` knows which
gradients have arrived.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

from partita.errors import PartitaError
from partita.memory.buffer_pool import Slot
from partita.memory.ledger import Ledger
from partita.memory.streams import Event
from partita.memory.tiers import Kept, StateMemory
from partita.plan.planned_gradients import PlannedGradients
from partita.plan.residence import Tier
from partita.plan.state_plan import StatePlan
from partita.planner.dtypes import dtype_of
from partita.sharding.gradient_buffer import BucketLayout, InPlaceBuffer, PooledBuffer, make_buffer
from partita.sharding.gradient_sync import GradientSync, StateOf, SyncCall, make_syncs
from partita.sharding.interpreter import Interpreter
from partita.sharding.parameter import Member
from partita.sharding.segment import Segment
from partita.sharding.squared_norm import square


class Arrivals:
    """By the members' ids.

    Attributes: ``used``: those that brought one since the last update; ``collected``: whose gradients lie in the
    buffer; ``fresh``: that brought one in this wave.
    """

    def __init__(self, members: Iterable[Member]) -> None:
        self.used = set[int]()
        self.collected = set[int]()
        self.fresh = set[int]()
        self._previous = set[int]()  # in the last wave
        self._expected: AbstractSet[int] = {id(member) for member in members}  # learned from the last two waves

    @property
    def is_complete(self) -> bool:
        """True if every expected gradient has arrived in this reduce pass."""
        return self._expected <= self.fresh

    def has_collected(self, member: Member) -> bool:
        """Return whether the buffer has a gradient of the member."""
        return id(member) in self.collected

    def note(self, member: Member, *, in_pass: bool) -> None:
        """A gradient has come; ``in_pass``: to be reduced with this backward's."""
        self.used.add(id(member))
        if in_pass:
            self.fresh.add(id(member))

    def collect(self, member: Member) -> None:
        """A gradient was moved into the buffer."""
        self.collected.add(id(member))
        self.used.add(id(member))

    def launched(self, *, learns: bool) -> None:
        """Note that the collected gradients are being reduced. ``learns``: expect the same in the next passes."""
        if learns:
            self._expected = self.fresh | self._previous or self._expected
        self._previous = set(self.fresh)
        self.collected.clear()

    def end_pass(self) -> None:
        """Begin another reduce pass."""
        self.fresh.clear()

    def clear(self) -> None:
        """All gradients are dropped, or used up."""
        self.collected.clear()
        self.fresh.clear()
        self.used.clear()


class SumOfCopies:
    """``steps`` to the sum over all copies; ``factor`` makes the mean of it, where copies' gradients are equal."""

    def __init__(self, planned: PlannedGradients) -> None:
        self.steps = planned.copy_steps
        self.factor = planned.copy_factor

    def run(self, shard: Tensor, interpreter: Interpreter, scratch: Tensor | None) -> None:
        """Bring the sum into ``shard``. A collective of the ranks that have copies.

        Args:
            scratch: memory that the steps need.
        """
        values = shard.to(interpreter.device)
        interpreter.run(self.steps, values, values, purpose="gradients", scratch=scratch)
        values.mul_(self.factor)
        if values is not shard:
            shard.copy_(values)


class BucketState(Enum):
    OPEN = "open"  # takes gradients
    REDUCED = "reduced"  # launched: the shard holds the sum once ``reduced`` has passed; in place: these are means


class Bucket:
    """Segments whose gradients are collected and reduced together.

    Attributes: ``buffer``: where they are collected; ``syncs``: how they are summed over the ranks, in the warm-up (if
    there is one) and later; ``copies``: how they are summed over all copies; ``arrivals``: who brought one;
    ``divisor``: ranks times micro-batches; ``has_all_copies``: the sums over copies are made.
    """

    def __init__(self, layout: BucketLayout, accumulate: int, ledger: Ledger) -> None:
        self.layout = layout
        self.buffer = make_buffer(layout, ledger)
        self.syncs = list[GradientSync]()
        self.copies = SumOfCopies(layout.planned.gradients)
        self.arrivals = Arrivals(layout.members)
        self.divisor = layout.planned.mesh.group_size(self.plan.mean_axes) * accumulate
        self.has_all_copies = not self.copies.steps
        self._is_warming_up = False
        self._state = BucketState.OPEN
        self._reduced = Event()
        self._squares = list[Tensor]()

    # ------------------------------------------------------------------ as planned

    @property
    def segments(self) -> Sequence[Segment]:
        return self.layout.segments

    @property
    def members(self) -> Sequence[Member]:
        return self.layout.members

    @property
    def plan(self) -> StatePlan:
        """The row of the table, which its segments share."""
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
    def passes(self) -> bool:
        """True if gradients are collected in a slot of a pool, in each backward anew."""
        return isinstance(self.buffer, PooledBuffer)

    @cached_property
    def moves(self) -> bool:
        """True if gradients leave the memory in which they are collected."""
        return self.passes or bool(self.layout.planned.gradients.reductions)

    @property
    def sums_tier(self) -> Tier | None:
        """The tier of the pool that sums pass through; None: they rest."""
        return self.layout.planned.gradients.sums_tier

    @property
    def is_measured(self) -> bool:
        """True if this rank's shard counts in the norm."""
        return self.layout.is_measured

    # ------------------------------------------------------------------------ now

    @property
    def shard(self) -> Kept | None:
        """This rank's row of the reduced gradient."""
        return self.buffer.shard

    @property
    def sync(self) -> GradientSync:
        """The sync of the current phase."""
        return self.syncs[0 if self._is_warming_up else -1]

    def warm_up(self, is_warming_up: bool) -> None:
        """Use the sync of the warm-up, or that of later steps."""
        self._is_warming_up = is_warming_up

    @property
    def is_left_over(self) -> bool:
        """True if there are gradients that no reduce pass has taken."""
        return self.moves and (bool(self.arrivals.collected) or bool(self.waiting))

    @property
    def waiting(self) -> list[Member]:
        """Members whose gradients are still with their parameters."""
        with torch._C.DisableTorchFunctionSubclass():  # sharded parameters answer through Python
            return [member for member in self.layout.members if member.grad is not None]

    # ---------------------------------------------------------------- collecting

    def allocate(self, memory: StateMemory) -> None:
        """Allocate the gradients that are stored here, and the states of their sync."""
        if not self.syncs:
            self.syncs = make_syncs(self.layout, memory)
        self.buffer.allocate(memory)

    def note(self, member: Member, *, in_pass: bool) -> None:
        """A member's gradient has come; ``in_pass``: to be reduced with this backward's."""
        self.arrivals.note(member, in_pass=in_pass)
        self.buffer.note(member)

    def collect(self, member: Member) -> None:
        """Move a parameter's gradient, divided, into the buffer: copied if it is its first, else added."""
        grad, full = member.grad, self.buffer.full
        if grad is None:
            return
        assert full is not None
        flat, first = member.flat(grad.detach()), not self.arrivals.has_collected(member)
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
        """Collect what is still with the parameters; zeros in place of gradients that did not come."""
        for member in self.waiting:
            self.collect(member)
        full = self.buffer.full
        assert full is not None
        if self.buffer.keeps_full and not all(sync.is_exact for sync in self.syncs):
            self.layout.clear_gaps(full)  # a block that is not finite left it so
        for piece in (piece for ps in self.layout.pieces_of_unused(self.arrivals.collected) for piece in ps):
            piece.of(full[piece.row]).zero_()

    def divide(self) -> None:
        """OPEN to REDUCED, in place: sums over the micro-batches become means.

        Raises:
            PartitaError: one was changed since backward.
        """
        assert isinstance(self.buffer, InPlaceBuffer)
        self.buffer.divide(self.waiting, self.divisor)
        self._state = BucketState.REDUCED

    def reopen(self) -> None:
        """REDUCED to OPEN, where gradients rest whole and take more: this rank's sum is put aside."""
        if self._state is BucketState.REDUCED:
            self.buffer.reopen(self._reduced)
            self._state = BucketState.OPEN

    # ------------------------------------------------------------------ reducing

    def launch(self, call: SyncCall, sums: Slot | None, scale: float) -> Callable[[], None]:
        """The work that brings the sum of what is collected now into ``shard``, to be run beside the caller's.

        Args:
            sums: where the sum is, if it rests nowhere.
            scale: what the gradients are multiplied by.
        """
        buffer = self.buffer
        if sums is not None:
            assert isinstance(buffer, PooledBuffer)
            buffer.borrow_for_sum(sums)
        assert buffer.full is not None
        assert buffer.shard is not None
        sent, kept, put_aside = buffer.full.view(-1), buffer.shard, buffer.put_aside
        adds = self._state is BucketState.REDUCED and sums is None
        sync, used = self.sync, frozenset(self.arrivals.used)
        self._squares = squares = list[Tensor]()

        def reduce() -> None:
            replaces = call.scratch is None and not adds and put_aside is None
            if replaces and (writing := kept.write_from(sent)) is not None:
                squares.extend(square(part) for part in self.parts(sent, used))
                with suppress(PartitaError):  # whoever reads it is told
                    writing.wait()
                return
            lease = kept.lend(read=adds)
            shard = lease.wait()
            sync.reduce(sent, shard, call, add=adds, scale=scale)
            if put_aside is not None:
                shard.add_(put_aside)
            if sums is not None and self.copies.steps:  # used up before the step
                self.copies.run(shard, call.interpreter, call.scratch)
            if kept.tier is Tier.DISK:
                squares.extend(square(part) for part in self.parts(shard, used))
            lease.end(changed=True)

        return reduce

    def launched(self, reduced: Event) -> Slot | None:
        """To REDUCED: ``shard`` has the sum when ``reduced`` has passed. Returns the slot that is free then."""
        # Where gradients do not rest, what came too late would have no place to wait.
        self.arrivals.launched(learns=self.plan.gradients_rest)
        self._reduced = reduced
        self._state = BucketState.REDUCED
        return self.buffer.release()

    def add_copies(self, interpreter: Interpreter, scratch: Tensor | None) -> None:
        """Bring what ``copies`` make into ``shard``, once nothing is added to it any more."""
        assert self.shard is not None
        lease = self.shard.lend()
        self.copies.run(lease.wait(), interpreter, scratch)
        if self.shard.tier is Tier.DISK:
            self._squares = [square(part) for part in self.parts(lease.tensor, set(map(id, self.layout.members)))]
        lease.end(changed=True)
        self.has_all_copies = True

    def gather(self, call: SyncCall, used: AbstractSet[int], factor: float) -> None:
        """Bring the sums to where the optimizer works on more than this rank's row.

        Args:
            used: ids of the members that got a gradient on any rank.
            factor: what this rank's row was multiplied by.
        """
        assert self.shard is not None
        unused = self.layout.pieces_of_unused(used)
        self.sync.gather(self.shard.lend().tensor, self.buffer.full, call, factor=factor, unused=unused)

    def clear(self) -> Slot | None:
        """To OPEN: drop all gradients. Returns the slot that is free now, where a backward did not end."""
        for member in self.waiting:
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
    def squares(self) -> list[Tensor]:
        """The squared norms of the :meth:`parts` of a shard on disk, measured while it was in memory."""
        return self._squares if self._state is BucketState.REDUCED else []

    def parts(self, shard: Tensor, used: AbstractSet[int]) -> list[Tensor]:
        """The shard's values as the norm adds them up: segment by segment, or, where a rank owns all, parameter by
        parameter (as those that autograd left in place), of those that are ``used``.
        """
        if self.layout.num_rows > 1:
            return list(shard.split([segment.layout.part_elements for segment in self.layout.segments]))
        owned = (self.owned_of(member, shard) for member in self.layout.members if id(member) in used)
        return [part for part in owned if part is not None]

    def owned_of(self, member: Member, shard: Tensor | None) -> Tensor | None:
        """This rank's piece of a member's reduced gradient; None where it owns nothing of it.

        ``shard``: the values of :attr:`shard`, where there is one.
        """
        if shard is None:
            return member.param.grad
        return next((piece.of(shard) for piece in self.layout.pieces[id(member)] if piece.row == self.layout.row), None)

    def grad_of(self, member: Member, shard: Tensor | None) -> Tensor | None:
        """The gradient the optimizer sees: this rank's piece, or all of it where gradients end up whole."""
        sees_whole = self.layout.planned.mesh.group_size(self.plan.grad_step.shard_axes) == 1
        if shard is None or not sees_whole:
            return self.owned_of(member, shard)
        full, offset = self.buffer.full, member.span.offset
        whole = shard if full is None else full.view(-1)
        return member.shaped(whole[offset : offset + member.span.num_elements])

    def held_of(self, member: Member, device: torch.device, *, is_first: bool) -> Tensor:
        """Return this rank's term of a member's mean gradient, ``[numel]`` in fp32: its row of the sums so far, if it
        ``is_first`` of the ranks that have the same, and what came since. The ranks' terms add up to the gradient.
        """
        values = torch.zeros(member.span.num_elements, dtype=torch.float32, device=device)
        is_reduced, full = self._state is BucketState.REDUCED, self.buffer.full
        sums = self.buffer.put_aside
        if sums is None and is_reduced and self.plan.gradients_rest and self.shard is not None:
            sums = self.shard.load().to(device)
        for piece in self.layout.pieces[id(member)]:
            if is_first and piece.row == self.layout.row and sums is not None:
                values[piece.start : piece.stop] += piece.of(sums)
            if self.arrivals.has_collected(member) and full is not None:
                values[piece.start : piece.stop] += piece.of(full[piece.row])
        if (grad := member.grad) is not None:
            is_mean = not self.buffer.collects and is_reduced
            values.add_(member.flat(grad.detach()).float(), alpha=1.0 if is_mean else 1.0 / self.divisor)
        return values


class SyncStates:
    """Ends steps, saves and loads for the syncs of all ``buckets``, of which more may come."""

    def __init__(self, buckets: list[Bucket], interpreter: Interpreter) -> None:
        self._buckets = buckets
        self._interpreter = interpreter

    def _kept(self) -> Iterator[tuple[Bucket, GradientSync]]:
        """The buckets whose sync, once the warm-up is over, keeps errors."""
        return ((bucket, bucket.syncs[-1]) for bucket in self._buckets if bucket.syncs[-1].keeps_errors)

    def __bool__(self) -> bool:
        """True if any sync keeps states. Sums are then scaled in place, also in the warm-up."""
        return any(True for _ in self._kept())

    def drop_unused(self, used: AbstractSet[int]) -> None:
        """All is reduced: gradients of members that are not ``used`` (by id) on any rank are zeros."""
        for bucket, sync in self._kept():
            if bucket.shard is not None:
                sync.drop_unused(bucket.shard.lend().tensor, bucket.layout.pieces_of_unused(used))

    def commit(self, used: AbstractSet[int]) -> None:
        """The step ends in an update of those that are ``used``."""
        for bucket, sync in self._kept():
            sync.commit(bucket.layout.pieces_of_unused(used))

    def settle(self) -> None:
        """Make what is saved all that there is. A collective, between two steps."""
        for _, sync in self._kept():
            sync.settle(self._interpreter)

    def saved(self, segment: Segment) -> Tensor | None:
        """Return this rank's part of a segment, ``[part_elements]``, for a checkpoint; call :meth:`settle` first."""
        for bucket, sync in self._kept():
            if any(each is segment for each in bucket.segments):
                return sync.saved(segment)
        return None

    def start(self, state_of: StateOf) -> None:
        """The warm-up is over, or states were loaded. A collective, between two steps."""
        for bucket, sync in self._kept():
            sync.start(bucket.members, state_of, self._interpreter)

    def clear(self) -> None:
        """Forget all, before other values are loaded."""
        for _, sync in self._kept():
            sync.clear()
