"""The sum of a gradient over the ranks that have copies of its parameter, of shards, once."""

from torch import Tensor

from partita.plan.planned import PlannedSegment
from partita.sharding.movement import Movement, finish_all


class SumOfCopies:
    """``steps`` to the sum over all copies; ``factor`` makes the mean of it, where copies' gradients are equal."""

    def __init__(self, planned: PlannedSegment) -> None:
        self.steps = planned.gradients.copy_steps
        self.factor = planned.gradients.copy_factor

    def run(self, shard: Tensor, movement: Movement, received: Tensor | None) -> None:
        """Bring the sum into ``shard``. A collective of the ranks that have copies.

        Args:
            received: scratch memory that the steps need.
        """
        values = shard.to(movement.device)
        finish_all(movement.begin(self.steps, values, values, purpose="gradients", received=received))
        values.mul_(self.factor)
        if values is not shard:
            shard.copy_(values)
