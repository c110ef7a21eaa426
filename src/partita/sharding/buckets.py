"""Where gradients are collected and reduced: buckets of constant order, of one large or several small segments.

Names: a bucket's ``whole`` is ``[num_rows, num_columns]``, a row for each rank that will own its sum; ``shard`` is this
rank's row of the reduced gradient, ``[num_columns]``, kept in the table's tier. Where the table keeps gradients whole
on the device between micro-batches, ``whole`` rests and ``shard`` is a row of it; elsewhere ``whole`` is a slot of a
buffer pool while one backward fills and sends it, and where gradients rest nowhere ``shard`` is one, too. Where no step
leads from autograd's gradient to the optimizer's, there is neither: the gradient stays where autograd put it.
"""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import nullcontext, suppress
from enum import Enum

import torch
from torch import Tensor

from partita.errors import PartitaError
from partita.memory.allocate import over
from partita.memory.buffer_pool import Slot
from partita.memory.ledger import Ledger
from partita.memory.streams import Event
from partita.memory.tiers import InMemory, Kept, StateMemory
from partita.plan.residence import Tier
from partita.planner.dtypes import dtype_of
from partita.sharding.bucket_layout import BucketLayout
from partita.sharding.copies import SumOfCopies
from partita.sharding.feedback import Feedback
from partita.sharding.movement import Movement, finish_all
from partita.sharding.squares import square
from partita.sharding.unit import Member


class BucketState(Enum):
    OPEN = "open"  # takes gradients
    REDUCED = "reduced"  # launched: the shard holds the sum once ``reduced`` has passed; in place: these are means


class Bucket:
    """Segments whose gradients are collected and reduced together.

    Attributes: ``in_place``, ``rests_whole``, ``passes`` and ``sums_pass`` as the plan says
    (:class:`~partita.plan.planned.PlannedSegment`, those of ``planned``); ``moves``: gradients leave where they are
    collected, for other ranks or another memory; ``steps`` to the sums, ``copies`` to those over all copies,
    ``spreading`` what follows at the step, and ``carriage`` of running averages to all ranks; ``divisor``:
    ranks times micro-batches; ``has_all_copies``: those are made; ``is_first_copy``: this rank's shard counts, and
    ``is_measured``: in the norm; ``feedback``: what codes have held back, where they do.
    """

    def __init__(self, layout: BucketLayout, accumulate: int, ledger: Ledger) -> None:
        self.layout = layout
        self.segments = layout.segments
        self.members = layout.members
        self.planned = [segment.planned for segment in layout.segments]
        planned = self.planned[0]
        self.plan = planned.row
        self.dtype = dtype_of(self.plan.grad_step.encoding)
        self.num_bytes = layout.num_elements * self.dtype.itemsize
        self.shard_bytes = layout.num_columns * self.dtype.itemsize
        self.in_place = planned.gradient_in_place
        self.rests_whole = planned.gradient_rests_whole
        self.passes = planned.gradient_passes
        self.moves = self.passes or bool(planned.gradient_reductions)
        self.sums_pass = planned.sums_pass
        self.steps, self.spreading = planned.gradient_phases
        self._first_phases = planned.first_gradient_phases
        self._fills_gaps = any(wires.gradients.is_coded for wires in (planned.row.wires, planned.first_wires))
        self.carriage = planned.carriage(planned.row.wires.sums) if planned.carries else ()
        self.copies = SumOfCopies(planned)
        self.is_first_copy = layout.segments[0].is_first_copy
        self.is_measured = layout.segments[0].is_first_of_replica
        self.has_all_copies = not self.copies.steps
        self.feedback: Feedback | None = None
        self.divisor = planned.mesh.group_size(self.plan.summed_axes) * accumulate
        self._reduces_twice = len(planned.gradient_reductions) > 1
        self._row = 0
        self._sees_whole = planned.num_shards(self.plan.grad_step) == 1
        self._ledger = ledger
        self._bytes_in_place = 0
        self._state = BucketState.OPEN
        self._reduced = Event()
        self._whole: Tensor | None = None
        self._slot: Slot | None = None  # whose memory ``whole`` is, where it is borrowed
        self._shard: Kept | None = None
        self._carry: Tensor | None = None  # of what rests whole: the sum so far, while more is collected
        self._squares = list[Tensor]()
        self._versions = dict[int, int]()  # of gradients in place, as backward left them
        self._arrived = set[int]()  # members whose gradients lie in ``whole``
        self._fresh = set[int]()  # that brought one in this wave
        self._previously = set[int]()  # in the last wave
        self._expected = {id(member) for member in self.members}  # it waits for these, learned from the last two waves
        self._used = set[int]()

    @property
    def shard(self) -> Kept | None:
        """This rank's row of the reduced gradient."""
        return self._shard

    @property
    def used(self) -> AbstractSet[int]:
        """Ids of the members that brought a gradient since the last update."""
        return self._used

    @property
    def is_fresh(self) -> bool:
        """Whether any member brought a gradient in this wave."""
        return bool(self._fresh)

    @property
    def is_complete(self) -> bool:
        """Whether this wave has brought all that is expected."""
        return self._expected <= self._fresh

    @property
    def is_left_over(self) -> bool:
        """Whether there are gradients that no wave has taken."""
        return self.moves and (bool(self._arrived) or bool(self.waiting))

    @property
    def lacks_memory(self) -> bool:
        """Whether it has to be lent a slot to collect in."""
        return self._whole is None

    @property
    def waiting(self) -> list[Member]:
        """Members whose gradients are still with their parameters."""
        with torch._C.DisableTorchFunctionSubclass():  # resting parameters answer through Python
            return [member for member in self.members if member.grad is not None]

    # ---------------------------------------------------------------- collecting

    def allocate(self, row: int, memory: StateMemory) -> None:
        """Have memory for the gradients that rest here. ``row`` is this rank's."""
        self._row = row
        if self.layout.segments[0].planned.held_sizes:
            self.feedback = Feedback(self.layout, row, memory)
        if self.in_place or self._shard is not None or not self.plan.gradients_rest:
            return
        tier = self.plan.grad_between.tier
        if self.rests_whole:
            room = memory.keep("gradients", self.layout.num_elements, self.dtype, tier)
            self._whole = room.lend().tensor.view(self.layout.num_rows, -1)
            self._shard = InMemory(self._whole[row], tier)
        else:
            self._shard = memory.keep("gradients", self.layout.num_columns, self.dtype, tier)

    def borrow(self, slot: Slot) -> None:
        """Collect in a slot of ``num_bytes`` until the launch."""
        slot.last_use.wait()
        self._slot = slot
        self._whole = over(slot.storage, self.dtype, self.layout.num_elements).view(self.layout.num_rows, -1)
        self.layout.clear_gaps(self._whole)

    def note(self, member: Member, *, in_wave: bool) -> None:
        """A member's gradient has come; ``in_wave``: to be reduced with this backward's."""
        self._used.add(id(member))
        if in_wave:
            self._fresh.add(id(member))
        if self.in_place and (grad := member.grad) is not None:
            if id(member) not in self._versions:
                self._bytes_in_place += grad.nbytes
                self._ledger.add("gradients", grad.nbytes)
            self._versions[id(member)] = grad._version

    def collect(self, member: Member) -> None:
        """Move a parameter's gradient, divided, into ``whole``: copied if it is its first, else added."""
        grad = member.grad
        if grad is None:
            return
        assert self._whole is not None
        flat, first = member.flat(grad.detach()), id(member) not in self._arrived
        for piece in self.layout.pieces[id(member)]:
            target, source = piece.of(self._whole[piece.row]), flat[piece.start : piece.stop]
            if not first:
                target.add_(source, alpha=1.0 / self.divisor)
            elif self.divisor == 1:
                target.copy_(source)
            elif target.dtype == source.dtype:
                torch.mul(source, 1.0 / self.divisor, out=target)
            else:
                target.copy_(source).mul_(1.0 / self.divisor)
        self._arrived.add(id(member))
        self._used.add(id(member))
        member.param.grad = None

    def fill_up(self) -> None:
        """Collect what is still with the parameters; zeros in place of gradients that did not come."""
        for member in self.waiting:
            self.collect(member)
        assert self._whole is not None
        if self.rests_whole and self._fills_gaps:
            self.layout.clear_gaps(self._whole)  # codes of a block that is not finite left it so
        for piece in (piece for pieces in self.layout.pieces_of_unused(self._arrived) for piece in pieces):
            piece.of(self._whole[piece.row]).zero_()

    def divide(self) -> None:
        """OPEN to REDUCED, in place: sums over the micro-batches become means.

        Raises:
            PartitaError: one was changed since backward.
        """
        for member in self.waiting:
            grad = member.param.grad
            assert grad is not None
            if self._versions.get(id(member), grad._version) != grad._version:
                raise PartitaError(
                    f"the .grad of '{member.fqn}' was changed between backward and step (by "
                    "torch.nn.utils.clip_grad_norm_?): on several ranks, and in other precisions, there is none to "
                    "change. Set clip_grad_norm in the config, or call engine.clip_grad_norm(max_norm) before "
                    "engine.step()"
                )
            if self.divisor != 1:
                grad.mul_(1.0 / self.divisor)
        self._state = BucketState.REDUCED

    def reopen(self) -> None:
        """REDUCED to OPEN, where gradients rest whole and take more: this rank's sum is put aside."""
        if self._state is BucketState.REDUCED:
            assert self._shard is not None
            self._reduced.wait()
            self._carry = self._shard.load()
            self._ledger.add("gradients", self._carry.nbytes)
            self._state = BucketState.OPEN

    # ------------------------------------------------------------------ reducing

    def total(self) -> Tensor:
        """The sum of all that was collected: not finite where an element is not."""
        assert self._whole is not None
        return self._whole.sum(dtype=torch.float32)

    def launch(
        self, movement: Movement, received: Tensor | None, sums: Slot | None, scale: float | None
    ) -> Callable[[], None]:
        """The work that brings the sum of what is collected now into ``shard``, to be run beside the caller's.

        Args:
            received: scratch memory that ``steps`` need.
            sums: where the sum is, if it rests nowhere.
            scale: what the gradients are multiplied by; None: it is one of the first steps.
        """
        if sums is not None:
            row = over(sums.storage, self.dtype, self.layout.num_columns)
            self._shard = InMemory(row, self.plan.grad_step.tier)
        assert self._whole is not None
        assert self._shard is not None
        sent, kept, carry, used = self._whole.view(-1), self._shard, self._carry, frozenset(self._used)
        adds = self._state is BucketState.REDUCED and sums is None
        self._squares = squares = list[Tensor]()
        ops = self._first_phases[0] if scale is None else self.steps
        feedback = None if scale is None else self.feedback

        def reduce() -> None:
            replaces = received is None and not adds and carry is None
            if replaces and (writing := kept.write_from(sent)) is not None:
                squares.extend(square(part) for part in self.parts(sent, used))
                with suppress(PartitaError):  # whoever reads it is told
                    writing.wait()
                return
            lease = kept.lend(read=adds)
            shard = lease.wait()
            # A second reduction of what was added to the sums before would count these again.
            apart = adds and self._reduces_twice
            summed = sent.view(self.layout.num_rows, -1)[self._row] if apart else shard
            if feedback is not None:
                feedback.weigh(sent)
            with nullcontext(()) if feedback is None else feedback.lent(scale or 1.0, movement.device) as held:
                moving, adding = movement.holding(held), adds and not apart
                if feedback is None or not feedback.sum_factors(sent, summed, moving, held, accumulate=adding):
                    begun = moving.begin(ops, sent, summed, purpose="gradients", accumulate=adding, received=received)
                    finish_all(begun)
            if feedback is not None:
                self.layout.clear_gaps(shard, only=self._row)
            if apart:
                shard.add_(summed.to(shard.device))
            if carry is not None:
                shard.add_(carry)
            if sums is not None and self.copies.steps:  # used up before the step
                self.copies.run(shard, movement, received)
            if kept.tier is Tier.DISK:
                squares.extend(square(part) for part in self.parts(shard, used))
            lease.end(changed=True)

        return reduce

    def add_copies(self, movement: Movement, received: Tensor | None) -> None:
        """Bring what ``copies`` make into ``shard``, once nothing is added to it any more."""
        assert self._shard is not None
        lease = self._shard.lend()
        self.copies.run(lease.wait(), movement, received)
        if self._shard.tier is Tier.DISK:
            self._squares = [square(part) for part in self.parts(lease.tensor, set(map(id, self.members)))]
        lease.end(changed=True)
        self.has_all_copies = True

    def launched(self, reduced: Event) -> Slot | None:
        """To REDUCED: ``shard`` has the sum when ``reduced`` has passed. Returns the slot that is free then."""
        if self.plan.gradients_rest:  # where they do not, what came too late would have no place to wait
            self._expected = self._fresh | self._previously or self._expected
        self._previously = set(self._fresh)
        self._arrived.clear()
        self._reduced = reduced
        self._state = BucketState.REDUCED
        return self._let_go()

    def end_wave(self) -> None:
        """What comes from now on is of another backward."""
        self._fresh.clear()

    def spread(
        self, movement: Movement, received: Tensor | None, used: AbstractSet[int], factor: float, in_full: bool
    ) -> None:
        """Bring the sums to where the optimizer works on more than this rank's row.

        Args:
            received: scratch memory that it takes.
            used: ids of the members that got a gradient on any rank.
            factor: what this rank's row was multiplied by.
        """
        assert self._shard is not None
        row, feedback = self._shard.lend().tensor, None if in_full else self.feedback
        if feedback is not None and feedback.average is not None:
            feedback.carry(row, movement, received, self.layout.pieces_of_unused(used))
            if self._sees_whole and self._whole is not None:
                self._whole.view(-1).copy_(feedback.average)
        elif self.spreading and (feedback is None or not feedback.scale_factors(self._whole, factor)):
            assert self._whole is not None
            ops = self._first_phases[1] if in_full else self.spreading
            with nullcontext(()) if feedback is None else feedback.lent(1.0, movement.device) as held:
                moving, whole = movement.holding(held[-1:]), self._whole.view(-1)
                finish_all(moving.begin(ops, row, whole, purpose="gradients", received=received))

    def clear(self) -> Slot | None:
        """To OPEN: drop all gradients. Returns the slot that is free now, where a backward did not end."""
        for member in self.waiting:
            member.param.grad = None
        self._ledger.remove("gradients", self._bytes_in_place)
        self._bytes_in_place = 0
        for forgotten in (self._arrived, self._fresh, self._used, self._versions):
            forgotten.clear()
        self._state = BucketState.OPEN
        self.has_all_copies = not self.copies.steps
        if self.feedback is not None:
            self.feedback.forget()
        return self._let_go()

    def _let_go(self) -> Slot | None:
        slot, self._slot = self._slot, None
        if slot is not None:
            self._whole = None
        if self._carry is not None:
            self._ledger.remove("gradients", self._carry.nbytes)
            self._carry = None
        return slot

    # ------------------------------------------------------------------- reduced

    @property
    def squares(self) -> list[Tensor]:
        """Of a shard on disk: the sums of squares of its :meth:`parts`, so that nobody has to read it."""
        return self._squares if self._state is BucketState.REDUCED else []

    def parts(self, shard: Tensor, used: AbstractSet[int]) -> list[Tensor]:
        """The shard's values as the norm adds them up: segment by segment, or, where a rank owns all, parameter by
        parameter (as those that autograd left in place), of those that are ``used``.
        """
        if self.layout.num_rows > 1:
            return list(shard.split([segment.layout.part_elements for segment in self.segments]))
        owned = (self.owned_of(member, 0, shard) for member in self.members if id(member) in used)
        return [part for part in owned if part is not None]

    def owned_of(self, member: Member, row: int, shard: Tensor | None) -> Tensor | None:
        """This rank's piece of a member's reduced gradient; None where it owns nothing of it.

        ``shard``: the values of :attr:`shard`, where there is one.
        """
        if shard is None:
            return member.param.grad
        return next((piece.of(shard) for piece in self.layout.pieces[id(member)] if piece.row == row), None)

    def grad_of(self, member: Member, row: int, shard: Tensor | None) -> Tensor | None:
        """The gradient the optimizer sees: this rank's piece, or all of it where gradients end up whole."""
        if shard is None or not self._sees_whole:
            return self.owned_of(member, row, shard)
        whole, offset = shard if self._whole is None else self._whole.view(-1), member.span.offset
        return member.shaped(whole[offset : offset + member.span.num_elements])

    def held_of(self, member: Member, row: int | None, device: torch.device) -> Tensor:
        """What this rank holds of a member's mean gradient, ``[numel]`` in fp32: its ``row`` of the sums so far (None:
        another rank has the same), and what came since. The ranks' add up to the gradient.
        """
        values = torch.zeros(member.span.num_elements, dtype=torch.float32, device=device)
        is_reduced = self._state is BucketState.REDUCED
        sums = self._carry
        if sums is None and is_reduced and self.plan.gradients_rest and self._shard is not None:
            sums = self._shard.load().to(device)
        for piece in self.layout.pieces[id(member)]:
            if piece.row == row and sums is not None:
                values[piece.start : piece.stop] += piece.of(sums)
            if id(member) in self._arrived and self._whole is not None:
                values[piece.start : piece.stop] += piece.of(self._whole[piece.row])
        if (grad := member.grad) is not None:
            is_mean = self.in_place and is_reduced
            values.add_(member.flat(grad.detach()).float(), alpha=1.0 if is_mean else 1.0 / self.divisor)
        return values
