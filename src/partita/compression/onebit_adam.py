"""1-bit Adam: the second moment is measured in a warm-up and frozen after it.

After the warm-up the ranks exchange only the running average of gradients, in a few bits with error feedback.

Source: Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", 2021,
algorithm 1. Two guards are not in it: after the warm-up, the average does not change elements with a second moment of
zero (sign codecs cannot encode zero), and it changes no element by more than the learning rate. Weight decay is
decoupled, and applies to all elements.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from partita.compression.error_feedback import ErrorFeedbackPlan, ErrorFeedbackSync, limit_to_range, with_residuals
from partita.kernels.chunks import in_chunks
from partita.memory.tiers import StateMemory
from partita.optim.extension import ComingUpdate, UpdateListener
from partita.optim.states import Views
from partita.optim.traits import runs_on_slices
from partita.sharding.gradient_buffer import BucketLayout
from partita.sharding.gradient_sync import StateOf, SyncCall, Unused
from partita.sharding.interpreter import Interpreter
from partita.sharding.parameter import Member
from partita.sharding.reducer import GradientReducer
from partita.table.formats import FULL, Format
from partita.table.planned_gradients import PlannedGradients
from partita.table.residence import FP32, Tier
from partita.table.steps import in_formats, steps
from partita.table.strategies import KeptState, Operations


@dataclass(frozen=True)
class AveragePlan(ErrorFeedbackPlan):
    """Plan that sums the running averages, and gathers them on all ranks.

    Attributes:
        momentum: the weight of the last average in the next one (Adam's beta1).
        exact_gathers: the uncompressed gathers.
    """

    momentum: float
    exact_gathers: Operations

    def make(self, layout: BucketLayout, memory: StateMemory) -> "AverageSync":
        return AverageSync(layout, self, memory)

    def kept(self, gradients: PlannedGradients) -> Iterator[KeptState]:
        yield from super().kept(gradients)
        yield KeptState("momentum", self.residual, FP32.num_bytes(gradients.layout.padded))


def average_gathers(gradients: PlannedGradients, form: Format = FULL) -> Operations:
    """Return the operations that gather the averages, which are sharded, on all ranks."""
    row = gradients.row
    summed = replace(row.grad_step, shard_axes=row.gradient_shard_axes, encoding=FP32, tier=Tier.DEVICE)
    return in_formats(steps(summed, replace(summed, shard_axes=()), gradients.mesh), FULL, form)


class AverageSync(ErrorFeedbackSync):
    """Sums of running averages. The optimizer receives the new average instead of a gradient."""

    gathers = True

    def __init__(self, layout: BucketLayout, plan: AveragePlan, memory: StateMemory) -> None:
        super().__init__(layout, plan, memory)
        planned = layout.planned
        size, copies = planned.mesh.group_size, planned.row.copies
        self._momentum = plan.momentum
        # The number of times that the last average would be added in the sum, including the copies.
        self._num_added = size(planned.row.summed_axes) * size(copies.axes) * planned.gradients.copy_factor
        self._exact_gathers = plan.exact_gathers
        self._has_full_gradients = size(planned.row.grad_step.shard_axes) == 1
        self.average = memory.keep("momentum", layout.num_elements, torch.float32, self._tier).lease().tensor

    def _sum(self, full: Tensor, out: Tensor, call: SyncCall, *, add: bool, scale: float) -> None:
        full.mul_(1.0 - self._momentum)
        super()._sum(full, out, call, add=add, scale=scale)

    def _begin(self, residual: Tensor, addend: Tensor) -> None:
        torch.add(residual, self.average, alpha=self._momentum / self._num_added, out=addend)

    def gather(
        self, shard: Tensor, full: Tensor | None, call: SyncCall, *, factor: float, scale: float, unused: Unused
    ) -> None:
        """Gather the new averages, of which each rank has its row. ``unused`` parameters keep their last average.

        All ranks use the decoded values, for their own row too. They are written in the units of ``shard``.
        """
        rows = self.average.view(self.layout.num_rows, -1)
        places = [piece.of(rows[piece.row]) for pieces in unused for piece in pieces]
        last = [values.clone() for values in places]
        with self._step_residuals(1.0, call.interpreter.device) as residuals:
            ops = with_residuals(self._gather_operations, residuals[-1:], self._mesh)
            own = shard.float() if scale == 1.0 else shard.float() / scale
            call.interpreter.run(ops, own, self.average, purpose="gradients", scratch=call.scratch)
        self.layout.clear_gaps(rows)
        for values, before in zip(places, last, strict=True):
            values.copy_(before)
        _write_scaled(rows[self.row], shard, scale)
        if self._has_full_gradients and full is not None:
            _write_scaled(self.average, full.view(-1), scale)

    def start(self, members: Sequence[Member], state_of: StateOf, interpreter: Interpreter) -> None:
        """Gather the optimizer's averages, of which each rank has its shards, on all ranks."""
        row = torch.zeros(self.layout.num_columns, dtype=torch.float32, device=interpreter.device)
        for member in members:
            if (values := state_of(member, "exp_avg")) is not None:
                for piece in (piece for piece in self.layout.pieces[id(member)] if piece.row == self.row):
                    begin = piece.start if values.numel() == member.span.num_elements else 0
                    piece.of(row).copy_(values[begin : begin + piece.stop - piece.start])
        interpreter.run(self._exact_gathers, row, self.average, purpose="gradients")


def _write_scaled(values: Tensor, out: Tensor, scale: float) -> None:
    """Write ``values`` times ``scale`` to ``out``, which may be in fp16."""
    for part, out_part in in_chunks(values, out):
        out_part.copy_(part if scale == 1.0 else part * scale)
    limit_to_range(out)


@runs_on_slices
class OnebitAdam(Optimizer):
    """Adam whose second moment is measured in a warm-up, and then stays constant.

    Attributes:
        is_warming_up: True while the second moment is measured.
        receives_averages: True if the gradients passed to it are the new running averages.
    """

    is_warming_up = True
    receives_averages = False

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)
        return loss

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[param], group["betas"]
        if not state:
            averages = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
            state.update(step=torch.tensor(0.0, dtype=torch.float32, device="cpu"), **averages)
        if self.is_warming_up:
            state["step"] += 1
        num = max(float(state["step"]), 1.0)
        for weights, new, average, second in in_chunks(param, grad, state["exp_avg"], state["exp_avg_sq"]):
            self._update_moments(average, second, new, group)
            change = self._change_of(average, second, 1 - beta2**num, group)
            if self.is_warming_up:
                change /= 1 - beta1**num
            weights.mul_(1 - group["lr"] * group["weight_decay"]).sub_(change, alpha=group["lr"])

    def _update_moments(self, average: Tensor, second: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
        """Update the moments by a gradient, or by the new average."""
        beta1, beta2 = group["betas"]
        if self.receives_averages:
            average.copy_(grad)
        else:
            average.lerp_(grad, 1 - beta1)
        if self.is_warming_up:
            second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)

    def _change_of(self, average: Tensor, second: Tensor, correction: float, group: Mapping[str, Any]) -> Tensor:
        """Return the change of the elements at a learning rate of 1.

        After the warm-up it is at most 1, and 0 if the second moment is 0.

        Args:
            correction: the divisor that corrects the second moment's bias.
        """
        measured = second if self.is_warming_up else torch.threshold(second, 0, torch.inf)
        deviation = (measured / correction).sqrt_().add_(group["eps"])
        change = torch.div(average, deviation, out=deviation)
        return change if self.is_warming_up else change.clamp_(-1, 1)


class WarmupListener(UpdateListener):
    """Listener that sets the optimizer's mode for the phases of training."""

    def __init__(self, reducer: GradientReducer, optimizer: OnebitAdam, views: Views) -> None:
        self._reducer = reducer
        self._optimizer = optimizer
        self._views = views
        self._checked = set[str]()  # names of parameters that were checked after the warm-up

    def before_update(self, coming: ComingUpdate) -> None:
        later = [bucket.syncs[-1] for bucket in self._reducer.buckets]
        has_averages = any(isinstance(sync, AverageSync) for sync in later)
        if not coming.is_warming_up:
            self._warn_about_untrained(coming)
        self._optimizer.is_warming_up = coming.is_warming_up
        self._optimizer.receives_averages = has_averages and not coming.is_warming_up

    def _warn_about_untrained(self, coming: ComingUpdate) -> None:
        """Warn about parameters that had no update in the warm-up. Without a second moment they do not train."""
        for member in (member for bucket in self._reducer.buckets for member in bucket.members):
            view = self._views.of(member.param)
            is_used = id(member) in coming.used and view is not None and view.num_elements > 0
            if not is_used or member.fqn in self._checked or view is None:
                continue
            self._checked.add(member.fqn)
            if not float(self._optimizer.state.get(view.tensor, {}).get("step", 0.0)):
                warnings.warn(
                    f"step {coming.step}: '{member.fqn}' had no update in the warm-up of OnebitAdam, so "
                    "its second moment is zero and it does not train; unfreeze it before the warm-up ends, or raise "
                    "communication.warmup_steps",
                    stacklevel=6,
                )
