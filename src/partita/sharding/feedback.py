"""What codes of gradients have held back: error feedback, a state with a residence.

Each rank has its own, of the values that it sends, in units of the mean gradient; what counts is the sum over the
ranks. It changes when a step ends in an update: until then there are the values before it and the values after it, so
that a step that is left out leaves nothing behind. What is held of a rank's own part is added as it is, not encoded:
a checkpoint brings the whole sum there (:meth:`Feedback.flush`), in the run that goes on and in one that loads it.

Sources: Seide et al., "1-bit stochastic gradient descent", 2014; Karimireddy et al., "Error feedback fixes SignSGD",
2019.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from partita.comm.transport import write_out
from partita.memory.streams import finish
from partita.memory.tiers import StateMemory
from partita.plan.planned import PlannedSegment
from partita.plan.wire import FULL
from partita.planner.memory import HELD_COPIES
from partita.sharding.bucket_layout import BucketLayout, Piece
from partita.sharding.factors import Factors
from partita.sharding.movement import Movement, finish_all
from partita.sharding.unit import Member, Segment


class Feedback:
    """Of one bucket: ``[num_rows, num_columns]`` of what is sent, of each further sum its part of that, and of the sums
    that are gathered this rank's.

    Args:
        row: this rank's.
    """

    def __init__(self, layout: BucketLayout, row: int, memory: StateMemory) -> None:
        planned: PlannedSegment = layout.segments[0].planned
        self._layout = layout
        self._row = row
        self._tier = planned.row.feedback.tier
        self._full_sums = planned.full_sums
        self._is_first_copy = layout.segments[0].is_first_copy
        per_segment = [segment.planned.held_sizes for segment in layout.segments]
        self._sizes = [sum(sizes) for sizes in zip(*per_segment, strict=True)]
        self._held, self._next = (
            memory.keep("feedback", sum(self._sizes), torch.float32, self._tier).lend().tensor
            for _ in range(HELD_COPIES)
        )
        self._is_open = False  # codes were sent since the last update
        self._sums_in_turn = len(planned.gradient_reductions) > 1
        # The optimizer's running average that all ranks have, of which what they send is made.
        self.average: Tensor | None = None
        self.factors = Factors(layout, planned.row.wires.factor_rank) if planned.sums_factors else None
        self._momentum = planned.row.wires.momentum
        size, copies = planned.mesh.group_size, planned.row.copies
        # How often what all ranks have would count in the sum, over the copies too.
        self._num_added = size(planned.row.summed_axes) * size(copies.axes) * planned.copy_factor
        self._carriage = planned.carriage(planned.row.wires.sums)
        self._full_carriage = planned.carriage(FULL)
        if planned.carries:
            self.average = memory.keep("momentum", layout.num_elements, torch.float32, self._tier).lend().tensor

    def weigh(self, sent: Tensor) -> None:
        """Where a running average travels: gradients count in it for what the last average does not."""
        if self.average is not None:
            sent.mul_(1.0 - self._momentum)

    @contextmanager
    def lent(self, scale: float, device: torch.device) -> Iterator[list[Tensor]]:
        """What is held of each sum, in memory of the ``device``, for gradients that are multiplied by ``scale``; what
        it is afterwards becomes valid with the update.
        """
        values = self._next
        if not self._is_open:
            (held, *further), (first, *others) = self._levels(self._held), self._levels(values)
            if self.average is not None:
                torch.add(held, self.average, alpha=self._momentum / self._num_added, out=first)
            else:
                first.copy_(held)
            for kept, level in zip(further, others, strict=True):
                level.copy_(kept)
        values = values.to(device)
        self._is_open = True
        if scale != 1.0:
            values.mul_(scale)
        yield self._levels(values)
        if scale != 1.0:
            values.mul_(1.0 / scale)
        self._layout.clear_gaps(self._levels(values)[0].view(self._layout.num_rows, -1))
        if values is not self._next:
            self._next.copy_(values)

    def sum_factors(
        self, sent: Tensor, out: Tensor, movement: Movement, held: Sequence[Tensor], *, accumulate: bool
    ) -> bool:
        """Where sums are of low-rank factors: have ``sent`` be the sum, write this rank's row of it into ``out``, or
        add it; whether they are.
        """
        if self.factors is not None:
            rows = sent.view(self._layout.num_rows, -1)
            self.factors.reduce(rows, held[0].view_as(rows), movement.group(self._layout.segments[0].plan.summed_axes))
            write_out(rows[self._row], out, accumulate=accumulate)
        return self.factors is not None

    def scale_factors(self, whole: Tensor | None, factor: float) -> bool:
        """Where every rank has decoded the ``whole`` sum: multiply the rows of the others, too; whether it has."""
        if self.factors is None or not self.factors.are_whole or whole is None:
            return False
        for number, row in enumerate(whole.view(self._layout.num_rows, -1)):
            if number != self._row:
                row.mul_(factor)
        return True

    def leave_out(self, shard: Tensor, unused: Iterable[Sequence[Piece]]) -> None:
        """Where nobody has a gradient, what codes brought of what was held back is no gradient either."""
        for piece in (piece for pieces in unused for piece in pieces if piece.row == self._row):
            piece.of(shard).zero_()

    def carry(
        self, row: Tensor, movement: Movement, received: Tensor | None, unused: Iterable[Sequence[Piece]]
    ) -> None:
        """Bring the running averages that the ranks have summed up, each its ``row``, to all of them, as codes: what is
        decoded is the average, also where it was summed up. Of the ``unused`` it stays.
        """
        assert self.average is not None
        rows = self.average.view(self._layout.num_rows, -1)
        kept = [(piece.of(rows[piece.row]), piece.of(rows[piece.row]).clone()) for ps in unused for piece in ps]
        with self.lent(1.0, movement.device) as held:
            moving = movement.holding(held[-1:])
            begun = moving.begin(self._carriage, row.float(), self.average, purpose="gradients", received=received)
            finish_all(begun)
        self._layout.clear_gaps(rows)
        for values, before in kept:
            values.copy_(before)
        row.copy_(rows[self._row])

    def take_averages(
        self, members: Iterable[Member], average_of: Callable[[Member], Tensor | None], movement: Movement
    ) -> None:
        """See :meth:`~partita.sharding.held_back.HeldBack.take_averages`."""
        if self.average is None:
            return

        row = torch.zeros(self._layout.num_columns, dtype=torch.float32, device=movement.device)
        for member in members:
            if (values := average_of(member)) is not None:
                for piece in (piece for piece in self._layout.pieces[id(member)] if piece.row == self._row):
                    begin = piece.start if values.numel() == member.span.num_elements else 0
                    piece.of(row).copy_(values[begin : begin + piece.stop - piece.start])
        finish_all(movement.begin(self._full_carriage, row, self.average, purpose="gradients"))

    def commit(self, unused: Iterable[Sequence[Piece]]) -> None:
        """The step ends in an update, of all but ``unused`` gradients: what was held of those still is."""
        if not self._is_open:
            return
        for pieces in unused:
            for before, after in self._places(pieces):
                after.copy_(before)
        self._held, self._next, self._is_open = self._next, self._held, False
        if self.factors is not None:
            self.factors.commit()

    def forget(self) -> None:
        """The step ends without an update."""
        self._is_open = False
        if self.factors is not None:
            self.factors.forget()

    def clear(self) -> None:
        """Hold nothing."""
        self._held.zero_()
        self._is_open = False
        if self.factors is not None:
            self.factors.clear()

    @property
    def own(self) -> Tensor:
        """What is held of this rank's own part, ``[num_columns]``: all there is after :meth:`flush`."""
        first: Tensor = self._levels(self._held)[0]
        return first.view(self._layout.num_rows, -1)[self._row]

    def own_of(self, segment: Segment) -> Tensor:
        """What :attr:`own` has of one segment, ``[part_elements]``."""
        parts: Sequence[Tensor] = self.own.split([each.layout.part_elements for each in self._layout.segments])
        return next(part for each, part in zip(self._layout.segments, parts, strict=True) if each is segment)

    def flush(self, movement: Movement) -> None:
        """Bring the sum over the ranks, in full, into each rank's :attr:`own`. A collective, between two steps."""
        assert not self._is_open
        if self.factors is not None:  # a run that goes on from a checkpoint starts them anew
            self.factors.clear()
        values = self._held.to(movement.device)
        first, *further = self._levels(values)
        rows = first.view(self._layout.num_rows, -1)
        for level in further:
            part = level.view(-1, self._layout.num_columns)
            rows[self._rows_of(len(part))] += part
        total = torch.empty_like(rows[self._row])
        num_bytes = movement.scratch_bytes(self._full_sums, first.numel(), first.itemsize)
        received = torch.empty(num_bytes // first.itemsize, dtype=first.dtype, device=movement.device)
        finish_all(movement.begin(self._full_sums, first, total, purpose="gradients", received=received))
        self._held.zero_()
        if self._is_first_copy:
            self.own.copy_(total)
        finish(movement.device)

    def _levels(self, values: Tensor) -> list[Tensor]:
        parts: Sequence[Tensor] = values.split(self._sizes)
        return list(parts)

    def _rows_of(self, num: int) -> slice:
        """Which rows a sum is of to which a rank gives ``num`` of them: its own with every so many before and after, or
        with those beside it, where there is an operation for each sum.
        """
        if self._sums_in_turn:
            first = self._row // num * num
            return slice(first, first + num)
        apart = self._layout.num_rows // num
        return slice(self._row % apart, None, apart)

    def _places(self, pieces: Sequence[Piece]) -> Iterator[tuple[Tensor, Tensor]]:
        """A parameter's values before and after the step, in every sum."""
        for held, following in zip(self._levels(self._held), self._levels(self._next), strict=True):
            before, after = (values.view(-1, self._layout.num_columns) for values in (held, following))
            rows = range(self._layout.num_rows)[self._rows_of(len(before))]
            for piece in pieces:
                if piece.row in rows:
                    number = rows.index(piece.row)
                    yield piece.of(before[number]), piece.of(after[number])
