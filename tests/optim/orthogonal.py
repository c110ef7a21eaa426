"""An optimizer outside the package that needs full matrices: SGD whose momentum of matrices is orthogonalized.

Ranks that have slices of a matrix all-gather its momentum, orthogonalize the full matrix, and update their own slices.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; the scale of updates: Liu et
al., "Muon is Scalable for LLM Training", 2025, section 2.2.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from partita.errors import ConfigError
from partita.optim.extension import CollectiveOptimizer
from partita.optim.states import View, Views
from partita.optim.traits import runs_on_slices
from partita.sharding.interpreter import Interpreter
from partita.sharding.runtime import Runtime
from partita.sharding.segment import Segment
from partita.table.steps import steps

# Coefficients of the Newton-Schulz iteration x -> a x + b (x x^T) x + c (x x^T)^2 x.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_NUM_ITERATIONS = 5
_EPS = 1e-7
# The root mean square of an update's elements, relative to the learning rate.
_SCALE = 0.2

MOMENTUM = "momentum_buffer"


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return an approximation of the nearest semi-orthogonal matrix, scaled by ``0.2 * sqrt(max(rows, columns))``.

    Args:
        matrix: ``[rows, columns]``. The result is in fp32, and depends only on the matrix's values and strides.
    """
    rows, columns = matrix.shape
    x: Tensor = matrix.to(torch.float32, copy=True)
    if rows > columns:
        x = x.T
    x = x / (x.norm() + _EPS)
    for _ in range(_NUM_ITERATIONS):
        gram = x @ x.T  # [n, n], with n the smaller size
        x = _A * x + (_B * gram + _C * (gram @ gram)) @ x
    if rows > columns:
        x = x.T
    return x.mul(_SCALE * math.sqrt(max(rows, columns)))


@runs_on_slices
class Orthogonal(CollectiveOptimizer):
    """SGD with momentum; the momentum of each parameter with two dimensions is orthogonalized before its update.

    It runs on slices of parameters once it is connected to a runtime. Its step is then a collective.
    """

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float = 1e-3, momentum: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self._shards: Shards | None = None

    def connect(self, runtime: Runtime, views: Views) -> None:
        """Connect the optimizer to the ranks' slices of parameters.

        Raises:
            ConfigError: states are not on the device, or a rank's tensor is a part of a matrix.
        """
        self._shards = Shards(runtime, views)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. A collective if parameters are sharded."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        updates = dict[Tensor, Tensor]()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if MOMENTUM not in state:
                        state[MOMENTUM] = torch.zeros_like(param)
                    updates[param] = state[MOMENTUM].mul_(group["momentum"]).add_(param.grad)
        if self._shards is not None and self._shards.has(updates):
            updates |= self._shards.orthogonalized(updates)
        else:  # full parameters, also those of a trial (partita.optim.traits)
            updates |= {param: orthogonalize(values) for param, values in updates.items() if param.dim() == 2}
        for group in self.param_groups:
            for param in group["params"]:
                if param in updates:
                    param.add_(updates[param], alpha=-float(group["lr"]))
        return loss


class Shards:
    """This rank's slices of matrices, and the gathers of the other ranks' slices.

    Raises:
        ConfigError: states are not on the device, or a rank's tensor is a part of a matrix.
    """

    def __init__(self, runtime: Runtime, views: Views) -> None:
        self._runtime = runtime
        self._views = views
        self._params = {view.tensor for view in views}
        self._interpreter = Interpreter(runtime.collectives)
        off_device = next((unit.title for unit in runtime.units if not unit.planned.row.updates_on_device), None)
        if off_device is not None:
            raise ConfigError(
                f"optimizer Orthogonal gathers matrices at the step, on the device, but {off_device} is updated "
                "elsewhere: set zero.offload.optimizer to none and precision.gradients to fp32"
            )
        part = next((view.member for view in views if _is_matrix(view) and view.member.span.place.is_part), None)
        if part is not None:
            raise ConfigError(
                f"optimizer Orthogonal needs all of each matrix, but this rank has {tuple(part.shape)} of "
                f"'{part.fqn}', {tuple(part.span.place.shape)}: use an elementwise optimizer such as AdamW, or set "
                "parallel.tensor to 1"
            )

    def has(self, params: Iterable[Tensor]) -> bool:
        """Return True if all ``params`` are slices of the model's parameters.

        Also True without ``params``: a rank may have no slice.
        """
        return all(param in self._params for param in params)

    def orthogonalized(self, momentum: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Return this rank's slices of the orthogonalized matrices, by the slice of the parameter. A collective.

        Args:
            momentum: this rank's slices of the momentum, by parameter. Parameters that are missing are not updated.
        """
        found = dict[Tensor, Tensor]()
        for unit in self._runtime.units:
            for segment in unit.trained:
                matrices = [view for view in self._views.of_segment(segment) if _is_matrix(view)]
                if matrices:  # the same on all ranks, whichever slices they have
                    full = self._gathered(segment, matrices, momentum)
                    for view in matrices:
                        if view.tensor in momentum:
                            values = orthogonalize(view.member.within(full))
                            found[view.tensor] = view.slice_of(view.member.flat(values))
        return found

    def _gathered(self, segment: Segment, matrices: Iterable[View], momentum: Mapping[Tensor, Tensor]) -> Tensor:
        """Return the momentum of a segment's matrices, ``[padded]``; other elements are zero."""
        moments, padded = segment.plan.moments, segment.layout.padded
        device = self._interpreter.device
        num_elements = moments.num_elements(padded, segment.mesh)
        shard = torch.zeros(num_elements, dtype=torch.float32, device=device)
        for view in matrices:
            if view.tensor in momentum:
                view.over(shard).copy_(momentum[view.tensor])
        operations = steps(moments, replace(moments, shard_axes=()), segment.mesh)
        if not operations:
            return shard
        full = torch.empty(padded, dtype=torch.float32, device=device)
        self._interpreter.run(operations, shard, full, purpose="parameters")
        return full


def _is_matrix(view: View) -> bool:
    return len(view.member.span.place.shape) == 2
