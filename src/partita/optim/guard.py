"""The optimizer's own ``step`` and ``zero_grad``, which find none of the gradients that wait for the engine's step."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from partita.errors import PartitaError
from partita.optim.snapshot import run_step


class Guard:
    """Refuses the optimizer's ``step`` and ``zero_grad`` to the user while they would do nothing, and say nothing.

    Args:
        waiting: whether a batch's gradients wait for the engine's step.
    """

    def __init__(self, optimizer: Optimizer, waiting: Callable[[], bool]) -> None:
        self._optimizer = optimizer
        self._waiting = waiting
        self._hook = optimizer.register_step_pre_hook(self._before_step)
        self._zero_grad = optimizer.zero_grad
        optimizer.zero_grad = self._before_zero_grad  # type: ignore[method-assign]
        self._steps = False  # the engine makes the step under way

    def remove(self) -> None:
        """Leave the optimizer to the user."""
        self._hook.remove()
        self._optimizer.__dict__.pop("zero_grad", None)

    @property
    def watched(self) -> bool:
        """Whether others have hooks on the optimizer's step."""
        optimizer = self._optimizer
        return len(optimizer._optimizer_step_pre_hooks) > 1 or bool(optimizer._optimizer_step_post_hooks)

    def step(self, needed: bool) -> None:
        """The engine's step, on what has a gradient; where it is not ``needed`` it is made for others' hooks only."""
        if needed or self.watched:
            self._steps = True
            try:
                run_step(self._optimizer)
            finally:
                self._steps = False
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers look for it

    def _before_step(self, *_: Any) -> None:
        if not self._steps and self._waiting():
            raise PartitaError(
                "optimizer.step() between backward and engine.step(): it finds no gradients and would change nothing; "
                "call engine.step() alone, which clips, steps the optimizer and the schedule, and zeroes gradients"
            )

    def _before_zero_grad(self, set_to_none: bool = True) -> None:
        if self._waiting():
            raise PartitaError(
                "optimizer.zero_grad() between backward and engine.step(): gradients are not where it looks for them, "
                "and would stay; to drop them call engine.zero_grad() (engine.step() zeroes them by itself)"
            )
        self._zero_grad(set_to_none)
