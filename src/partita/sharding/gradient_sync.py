"""Gradient syncs: how the gradients of one bucket are summed over its ranks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from partita.memory.tiers import StateMemory
from partita.sharding.gradient_buffer import BucketLayout, Piece
from partita.sharding.interpreter import Interpreter
from partita.sharding.parameter import Member
from partita.sharding.segment import Segment
from partita.table.steps import ReduceScatter
from partita.table.strategies import SyncPlan

Unused = Iterable[Sequence[Piece]]  # the pieces of each member that has no gradient on any rank
# Returns this rank's flat slice of an optimizer state of a member, by the state's name; None if there is none.
StateOf = Callable[[Member, str], Tensor | None]


@dataclass(frozen=True)
class SyncCall:
    """The arguments of one use of a sync: an interpreter with its own seed, and the plan's scratch memory."""

    interpreter: Interpreter
    scratch: Tensor | None


class GradientSync:
    """Sums a bucket over its ranks, by the operations of its plan.

    This class keeps nothing between steps. Subclasses that do override the methods after :meth:`gather`.
    """

    has_error_feedback = (
        False  # True with error feedback: sums are scaled in place, and the bucket's padding is cleared
    )

    def __init__(self, layout: BucketLayout, plan: SyncPlan) -> None:
        self.layout = layout
        self.row = layout.row
        self._sum_operations = plan.sums
        self._gather_operations = plan.gathers
        self._sums_in_turn = sum(isinstance(op, ReduceScatter) for op in plan.sums) > 1

    @property
    def is_exact(self) -> bool:
        """True if reduce-scatters communicate uncompressed values."""
        return all(op.format.is_exact for op in self._sum_operations if isinstance(op, ReduceScatter))

    @property
    def gathers(self) -> bool:
        """True if :meth:`gather` has anything to do."""
        return bool(self._gather_operations)

    def reduce(self, full: Tensor, shard: Tensor, call: SyncCall, *, add: bool, scale: float) -> None:
        """Write this rank's row of the sum into ``shard`` ``[num_columns]``, or ``add`` it.

        Args:
            full: this rank's gradients, ``[num_rows * num_columns]``; it may be overwritten.
            scale: the loss scale of the gradients.
        """
        adds_later = add and self._sums_in_turn  # the second of two sums would add `shard` once per rank
        out = full.view(self.layout.num_rows, -1)[self.row] if adds_later else shard
        self._sum(full, out, call, add=add and not adds_later, scale=scale)
        if self.has_error_feedback:
            self.layout.clear_gaps(shard, only=self.row)
        if adds_later:
            shard.add_(out.to(shard.device))

    def _sum(self, full: Tensor, out: Tensor, call: SyncCall, *, add: bool, scale: float) -> None:
        ops, scratch = self._sum_operations, call.scratch
        call.interpreter.run(ops, full, out, purpose="gradients", accumulate=add, scratch=scratch)

    def gather(
        self, shard: Tensor, full: Tensor | None, call: SyncCall, *, factor: float, scale: float, unused: Unused
    ) -> None:
        """All-gather the sums, once their norm is known, if the optimizer needs more than this rank's row.

        Args:
            shard: this rank's row, multiplied by ``factor``.
            full: the output, ``[num_rows, num_columns]``.
            scale: the divisor that turns ``shard`` into the gradients that the optimizer gets.
        """
        assert full is not None
        ops = self._gather_operations
        call.interpreter.run(ops, shard, full.view(-1), purpose="gradients", scratch=call.scratch)

    def drop_unused(self, shard: Tensor, unused: Unused) -> None:
        """Zero the ``unused`` pieces of the reduced ``shard``: no rank had a gradient there."""

    def commit(self, unused: Unused) -> None:
        """End a step with an update of all pieces except the ``unused`` ones."""

    def discard(self) -> None:
        """End a step without an update."""

    def prepare_for_checkpoint(self, interpreter: Interpreter) -> None:
        """Reduce the states to what a checkpoint saves, in this run too. A collective, between two steps."""

    def clear(self) -> None:
        """Forget the states kept between steps, before other values are loaded."""

    def saved(self, segment: Segment) -> Tensor | None:
        """Return this rank's states of a segment, ``[shard_elements]``, for a checkpoint.

        Call :meth:`prepare_for_checkpoint` first.
        """
        return None

    def start(self, members: Sequence[Member], state_of: StateOf, interpreter: Interpreter) -> None:
        """Prepare for the next step, after the warm-up or after the optimizer's states were loaded. A collective."""


class CustomSync(SyncPlan, ABC):
    """A plan with its own subclass of :class:`GradientSync`."""

    @abstractmethod
    def make(self, layout: BucketLayout, memory: StateMemory) -> GradientSync:
        """Create the sync with its states."""


def make_syncs(layout: BucketLayout, memory: StateMemory) -> list[GradientSync]:
    """Create the sync of the warm-up, if there is one, and that of all later steps."""
    return [
        plan.make(layout, memory) if isinstance(plan, CustomSync) else GradientSync(layout, plan)
        for plan in layout.planned.gradients.syncs
    ]
