"""The optimizer's own methods as the user calls them: none does something else than the user expects, silently."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from torch.optim import Optimizer

from partita.errors import PartitaError
from partita.optim.snapshot import run_step


class Guard:
    """Watches an optimizer's methods.

    ``step`` and ``zero_grad`` are refused while they would do nothing. What ``train`` and ``eval`` write into
    parameters (Schedule-Free's averages) is published.

    Args:
        waiting: returns True while a batch's gradients wait for the engine's step.
        writes: a context in which the optimizer may write parameters; after it all ranks have them. A collective.
    """

    def __init__(
        self, optimizer: Optimizer, waiting: Callable[[], bool], writes: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._optimizer = optimizer
        self._waiting = waiting
        self._hook = optimizer.register_step_pre_hook(self._before_step)
        self._zero_grad = optimizer.zero_grad
        optimizer.zero_grad = self._before_zero_grad  # type: ignore[method-assign]
        self._modes = [name for name in ("train", "eval") if callable(getattr(optimizer, name, None))]
        for name in self._modes:
            setattr(optimizer, name, self._published(getattr(optimizer, name), writes))
        self._steps = False  # the engine makes the step under way

    def remove(self) -> None:
        """Leave the optimizer to the user."""
        self._hook.remove()
        for name in ("zero_grad", *self._modes):
            self._optimizer.__dict__.pop(name, None)

    @staticmethod
    def _published(
        method: Callable[..., Any], writes: Callable[[], AbstractContextManager[None]]
    ) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with writes():
                return method(*args, **kwargs)

        return call

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
