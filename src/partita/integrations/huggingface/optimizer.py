"""The optimizer of an engine, as accelerate's training loops step it."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from partita.engine.engine import Engine
from partita.optim.updater import StepResult


class EngineOptimizer(AcceleratedOptimizer):
    """An optimizer that steps its engine when gradients are synchronized; its parameter groups are the engine's."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.optimizer, device_placement=False)
        self._engine = engine
        self._holds_gradients = False
        self._ahead: StepResult | None = None  # result of the next step, if clip() has run it early for its norm

    def gradients_added(self) -> None:
        """Record that a backward has accumulated gradients."""
        self._holds_gradients = True

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip the batch's gradients to a global norm; return the norm before clipping, on the engine's device."""
        if self._ahead is None and self._engine.config.precision.gradients == "in_backward":
            # Each unit was clipped and updated in its backward; the rest of the step returns the norm.
            self._ahead = self._engine.step()
        norm = self._engine.clip_grad_norm(max_norm) if self._ahead is None else self._ahead.grad_norm
        return torch.tensor(
            float("nan") if norm is None else norm, dtype=torch.float32, device=self._engine.mesh.device
        )

    def stepped_ahead(self, result: StepResult) -> None:
        """Note that the engine has made the next step already, with the batch of a pipeline."""
        self._ahead = result

    def discard_batch(self) -> None:
        """Discard the gradients, and a step made ahead, of a batch that an error has ended."""
        self._engine.zero_grad()
        self._holds_gradients = False
        self._ahead = None

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if self.gradient_state.sync_gradients:
            result = self._ahead or self._engine.step()
            self._is_overflow = result.skipped
            self._holds_gradients = False
            self._ahead = None

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Discard the gradients of a batch that is not stepped. After a step there are none."""
        if self.gradient_state.sync_gradients and self._holds_gradients:
            self._engine.zero_grad()
            self._holds_gradients = False
