"""The optimizer of an engine, as accelerate's loops step it."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from partita.engine.engine import Engine
from partita.optim.step import StepResult


class EngineOptimizer(AcceleratedOptimizer):
    """Steps an engine where gradients are synchronized; its groups are those of the engine's own optimizer."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.optimizer, device_placement=False)
        self._engine = engine
        self._holds_gradients = False
        self._ahead: StepResult | None = None  # of the step that comes, where it was made for its norm

    def collected(self) -> None:
        """A backward has brought gradients."""
        self._holds_gradients = True

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients of the batch to a global norm; returns the norm before, on the engine's device."""
        if self._engine.config.precision.gradients == "in_backward":
            # Each unit was updated in its backward, clipped by itself: what is left of the step says the norm.
            self._ahead = self._ahead or self._engine.step()
            norm = self._ahead.grad_norm
        else:
            norm = self._engine.clip_grad_norm(max_norm)
        return torch.tensor(
            float("nan") if norm is None else norm, dtype=torch.float32, device=self._engine.mesh.device
        )

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if self.gradient_state.sync_gradients:
            result = self._ahead or self._engine.step()
            self._is_overflow = result.skipped
            self._holds_gradients = False
            self._ahead = None

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients of a batch that is not stepped; after a step there are none."""
        if self.gradient_state.sync_gradients and self._holds_gradients:
            self._engine.zero_grad()
            self._holds_gradients = False
