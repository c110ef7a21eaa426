"""Gradient syncs: how the gradients of one bucket are summed over its ranks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from partita.memory.tiers import StateMemory
from partita.plan.steps import ReduceScatter
from partita.plan.strategies import SyncPlan
from partita.sharding.gradient_buffer import BucketLayout, Piece
from partita.sharding.interpreter import Interpreter
from partita.sharding.parameter import Member
from partita.sharding.segment import Segment

Unused = Iterable[Sequence[Piece]]  # the pieces of each member that has no gradient on any rank
# This rank's part of an optimizer state of a member, by the state's name, flat; None where there is none.
StateOf = Callable[[Member, str], Tensor | None]


@dataclass(frozen=True)
class SyncCall:
    """One use of a sync. The interpreter has random numbers of its own; ``scratch``: memory that the plan asks for."""

    interpreter: Interpreter
    scratch: Tensor | None


class GradientSync:
    """Sums a bucket over its ranks, by the operations of its plan.

    This class keeps nothing between steps. Subclasses do: they override what follows :meth:`gather`.
    """

    keeps_errors = False  # True if sums are scaled where they lie, and the bucket's padding has to be cleared

    def __init__(self, layout: BucketLayout, plan: SyncPlan) -> None:
        self.layout = layout
        self.row = layout.row
        self._sum_operations = plan.sums
        self._gather_operations = plan.gathers
        self._sums_in_turn = sum(isinstance(op, ReduceScatter) for op in plan.sums) > 1

    @property
    def is_exact(self) -> bool:
        """True if the values themselves travel to where the sums are made."""
        return all(op.format.is_exact for op in self._sum_operations if isinstance(op, ReduceScatter))

    @property
    def gathers(self) -> bool:
        """True if :meth:`gather` has anything to do."""
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
        ops, scratch = self._sum_operations, call.scratch
        call.interpreter.run(ops, full, out, purpose="gradients", accumulate=add, scratch=scratch)

    def gather(self, shard: Tensor, full: Tensor | None, call: SyncCall, *, factor: float, unused: Unused) -> None:
        """Bring the sums, whose norm is known, to where the optimizer needs more of them than this rank's row.

        Args:
            shard: this rank's row, multiplied by ``factor``.
            full: ``[num_rows, num_columns]``, to be overwritten.
        """
        assert full is not None
        ops = self._gather_operations
        call.interpreter.run(ops, shard, full.view(-1), purpose="gradients", scratch=call.scratch)

    def drop_unused(self, shard: Tensor, unused: Unused) -> None:
        """All is reduced: where no rank had a gradient, ``shard`` has none."""

    def commit(self, unused: Unused) -> None:
        """The step ends in an update, of all but the ``unused``."""

    def discard(self) -> None:
        """The step ends without an update."""

    def settle(self, interpreter: Interpreter) -> None:
        """Make what is saved of this rank all that there is, in this run too. A collective, between two steps."""

    def clear(self) -> None:
        """Forget what is kept between steps, before other values are loaded."""

    def saved(self, segment: Segment) -> Tensor | None:
        """Return this rank's part of a segment, ``[part_elements]``, for a checkpoint; call :meth:`settle` first."""
        return None

    def start(self, members: Sequence[Member], state_of: StateOf, interpreter: Interpreter) -> None:
        """This sync is used from the next step on, or the optimizer's states were loaded. A collective."""


class CustomSync(SyncPlan, ABC):
    """A plan that brings a :class:`GradientSync` of its own."""

    @abstractmethod
    def make(self, layout: BucketLayout, memory: StateMemory) -> GradientSync:
        """Return the live object, with its states."""


def make_syncs(layout: BucketLayout, memory: StateMemory) -> list[GradientSync]:
    """Return the sync of the warm-up, if there is one, and that of all later steps."""
    return [
        plan.make(layout, memory) if isinstance(plan, CustomSync) else GradientSync(layout, plan)
        for plan in layout.planned.gradients.syncs
    ]
