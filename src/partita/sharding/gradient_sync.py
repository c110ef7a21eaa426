"""How the gradients of one bucket are summed over its ranks: :class:`GradientSync`, and what its subclasses keep."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from partita.plan.steps import ReduceScatter, Step
from partita.sharding.bucket_layout import BucketLayout, Piece
from partita.sharding.movement import Movement, finish_all
from partita.sharding.unit import Member, Segment

Unused = Iterable[Sequence[Piece]]  # the pieces of each member that has no gradient on any rank
AverageOf = Callable[[Member], Tensor | None]


@dataclass(frozen=True)
class SyncCall:
    """One use of a sync: ``movement`` has random numbers of its own, ``scratch`` is memory that the operations need."""

    movement: Movement
    scratch: Tensor | None


class GradientSync:
    """Sums a bucket over its ranks, as the values are or in codes that are right on average.

    This class keeps nothing between steps. Subclasses do: they override what follows :meth:`gather`.

    Args:
        row: this rank's row of the bucket.
        operations: those that sum, and those that then bring sums to where the optimizer works on more than one row.
    """

    keeps_errors = False  # whether sums are scaled where they lie, and the bucket's padding has to be cleared

    def __init__(self, layout: BucketLayout, row: int, operations: tuple[tuple[Step, ...], tuple[Step, ...]]) -> None:
        self.layout = layout
        self.row = row
        self._sum_operations, self._gather_operations = operations
        self._sums_in_turn = sum(isinstance(op, ReduceScatter) for op in self._sum_operations) > 1

    @property
    def is_coded(self) -> bool:
        """Whether codes travel to where the sums are made."""
        return any(isinstance(op, ReduceScatter) and op.wire.is_coded for op in self._sum_operations)

    @property
    def gathers(self) -> bool:
        """Whether :meth:`gather` has anything to do."""
        return bool(self._gather_operations)

    def reduce(self, full: Tensor, shard: Tensor, call: SyncCall, *, add: bool, scale: float) -> None:
        """Write this rank's row of the sum into ``shard`` ``[num_columns]``, or add it.

        Args:
            full: this rank's gradients, ``[num_rows * num_columns]``; it may be overwritten.
            scale: what the gradients are multiplied by (the loss scale).
        """
        apart = add and self._sums_in_turn  # the second of two sums would count what `shard` holds once per rank
        out = full.view(self.layout.num_rows, -1)[self.row] if apart else shard
        self._sum(full, out, call, add=add and not apart, scale=scale)
        if self.keeps_errors:
            self.layout.clear_gaps(shard, only=self.row)
        if apart:
            shard.add_(out.to(shard.device))

    def _sum(self, full: Tensor, out: Tensor, call: SyncCall, *, add: bool, scale: float) -> None:
        self._move(full, out, call.movement, call.scratch, add=add)

    def _move(self, full: Tensor, out: Tensor, movement: Movement, scratch: Tensor | None, *, add: bool) -> None:
        ops = self._sum_operations
        finish_all(movement.begin(ops, full, out, purpose="gradients", accumulate=add, received=scratch))

    def gather(self, shard: Tensor, full: Tensor | None, call: SyncCall, *, factor: float, unused: Unused) -> None:
        """Bring the sums, whose norm is known, to where the optimizer needs more of them than this rank's row.

        Args:
            shard: this rank's row, multiplied by ``factor``.
            full: ``[num_rows, num_columns]``, to be overwritten.
        """
        assert full is not None
        ops = self._gather_operations
        begun = call.movement.begin(ops, shard, full.view(-1), purpose="gradients", received=call.scratch)
        finish_all(begun)

    def drop_unused(self, shard: Tensor, unused: Unused) -> None:
        """All is reduced: where no rank had a gradient, ``shard`` has none."""

    def commit(self, unused: Unused) -> None:
        """The step ends in an update, of all but the ``unused``."""

    def discard(self) -> None:
        """The step ends without an update."""

    def settle(self, movement: Movement) -> None:
        """Make what is saved of this rank all that there is, in this run too. A collective, between two steps."""

    def clear(self) -> None:
        """Forget what is kept between steps, before other values are loaded."""

    def saved(self, segment: Segment) -> Tensor | None:
        """What is saved of this rank's part of a segment, ``[part_elements]``, once all is settled."""
        return None

    def start(self, members: Sequence[Member], average_of: AverageOf, movement: Movement) -> None:
        """This sync is used from the next step on, or the optimizer's states were loaded. A collective.

        Args:
            average_of: what this rank has of the optimizer's running average of a member, flat.
        """
