"""The sum of a gradient over the ranks that have copies of its parameter, of shards, once."""

from torch import Tensor

from partita.plan.planned_gradients import PlannedGradients
from partita.sharding.interpreter import Interpreter


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
