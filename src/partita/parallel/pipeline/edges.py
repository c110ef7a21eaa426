"""Communication between stages: missing arguments of the next stage's first block, and their gradients.

Both stages run the model's own forward, so the receiver knows the shapes, which may differ between micro-batches. The
set of missing arguments depends only on the form of the call (:attr:`Arguments.form`). The receiver requests them from
the sender once for each new form.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from partita.comm.group import Group, Handle
from partita.errors import PartitaError
from partita.memory.accelerator import readable
from partita.memory.step_events import span
from partita.parallel.pipeline.early_exit import Arguments
from partita.parallel.pipeline.off_stage import OffStageTensor, is_missing, received_value
from partita.parallel.pipeline.stage import missing_input_error

PURPOSE = "pipeline"


@dataclass
class ReceivedInput:
    """Metadata and gradient of a received floating-point value. The value itself is only referenced by its graph."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    gradient: Tensor | None = None

    def gradient_or_zeros(self) -> Tensor:
        if self.gradient is None:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return self.gradient


class _Receive(torch.autograd.Function):
    """Graph node of a received value: the value may be changed in place, and its gradient is stored for the sender."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, passed: list[Tensor], received: ReceivedInput) -> Tensor:
        ctx.received = received
        return passed.pop()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.received.gradient = gradient
        return None, None, None


@dataclass
class Edges:
    """The connections of one stage of this rank with the stages before and after it.

    Args:
        group: the ranks of the pipeline.
        stage: the number of the stage, of ``num_stages``.
    """

    group: Group
    stage: int
    num_stages: int
    device: torch.device
    _requested: dict[object, tuple[int, ...]] = field(default_factory=dict)  # by the next stage, by form
    _missing: dict[object, tuple[int, ...]] = field(default_factory=dict)  # in this stage, by form
    _sent: list[list[Handle]] = field(default_factory=list)  # forward, by micro-batch
    _sent_back: list[list[Handle]] = field(default_factory=list)
    _num_back: int = 0  # the number of the batch's backwards whose sends have completed

    @property
    def _before(self) -> int:
        return (self.stage - 1) % self.group.size

    @property
    def _behind(self) -> int:
        return (self.stage + 1) % self.group.size

    # ------------------------------------------------------------------------- forward

    def send(self, arguments: Arguments, training: bool, reader: str) -> list[Tensor]:
        """Send the next stage the missing arguments of its first block ``reader``; return the floating-point ones.

        Raises:
            PartitaError: this rank does not have one of them.
        """
        form = arguments.form, training
        num = len(arguments.leaves)
        if form not in self._requested:
            request = torch.empty(num, dtype=torch.uint8, device=readable(self.device))
            _wait(self.group.receive([request], self._behind, "request", PURPOSE), "request")
            self._requested[form] = tuple(request.nonzero().view(-1).tolist())
        chosen = [arguments.leaves[at] for at in self._requested[form]]
        for leaf in chosen:
            if is_missing(leaf):
                raise missing_input_error(leaf, f"'{reader}'")
        values = [received_value(leaf) for leaf in chosen]
        handles = self.group.send([value.detach() for value in values], self._behind, "forward", PURPOSE)
        self._sent.append(list(handles))
        return [value for value in values if value.is_floating_point()]

    def receive(
        self, arguments: Arguments, missing: Sequence[int], training: bool
    ) -> tuple[list[Tensor], list[ReceivedInput]]:
        """Receive the missing arguments.

        Returns:
            The values, and records that will have the gradients of the floating-point ones (an empty list if gradients
            are disabled).

        Raises:
            PartitaError: an earlier call of the same form had other missing arguments.
        """
        form = arguments.form, training
        if form not in self._missing:
            self._missing[form] = tuple(missing)
            request = torch.zeros(len(arguments.leaves), dtype=torch.uint8, device="cpu")
            request[list(missing)] = 1
            on_device = request.to(readable(self.device))
            _wait(self.group.send([on_device], self._before, "request", PURPOSE), "what was sent")
        if self._missing[form] != tuple(missing):
            raise PartitaError(
                f"stage {self.stage} of the pipeline: expected the arguments {list(self._missing[form])} of its first "
                f"block to be missing, as in an earlier call of the same form; got {list(missing)}: an argument of a "
                "block must depend on parameters either in every call or in none"
            )
        shapes = [arguments.leaves[at] for at in missing]
        values = [torch.empty(tuple(shape.shape), dtype=shape.dtype, device=self.device) for shape in shapes]
        _wait(self.group.receive(values, self._before, "forward", PURPOSE), "forward")
        values = [_strided_as(value, shape) for value, shape in zip(values, shapes, strict=True)]
        if not torch.is_grad_enabled():
            return values, []
        received, anchor = list[ReceivedInput](), torch.zeros((), requires_grad=True, dtype=torch.float32, device="cpu")
        for at, value in enumerate(values):
            if value.is_floating_point():
                received.append(ReceivedInput(value.shape, value.dtype, value.device))
                values[at] = _Receive.apply(anchor, [value], received[-1])  # type: ignore[no-untyped-call]
        return values, received

    # ------------------------------------------------------------------------ backward

    def send_gradients(self, received: Sequence[ReceivedInput]) -> None:
        """Send the previous stage the gradients of the values that it sent; zeros for unused values."""
        gradients = [each.gradient_or_zeros() for each in received]
        for each in received:
            each.gradient = None  # deferred weight gradients keep the graph, and so the record, alive
        handles = self.group.send(gradients, self._before, "backward", PURPOSE) if gradients else []
        self._sent_back.append(list(handles))

    def receive_gradients(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Receive the gradients of the floating-point values that were sent, and wait for the send of these values."""
        gradients = [torch.empty(value.shape, dtype=value.dtype, device=self.device) for value in values]
        _wait(self.group.receive(gradients, self._behind, "backward", PURPOSE), "backward")
        _wait(self._sent.pop(0), "what was sent")
        return gradients

    def wait(self, max_pending: int = 0) -> None:
        """Wait until the forward sends of all but the last ``max_pending`` micro-batches have completed."""
        while len(self._sent) > max_pending:
            _wait(self._sent.pop(0), "what was sent")

    def wait_for_gradients(self, num: int) -> None:
        """Wait until the gradient sends of the batch's first ``num`` micro-batches have completed. The previous stage
        has already received them.
        """
        while self._num_back < num:
            _wait(self._sent_back.pop(0), "what was sent")
            self._num_back += 1

    def end_batch(self) -> None:
        """Wait until all sends have completed."""
        self.wait()
        self.wait_for_gradients(self._num_back + len(self._sent_back))
        self._num_back = 0

    def abandon(self) -> None:
        """Drop all sends, whether they have completed or not."""
        self._sent.clear()
        self._sent_back.clear()


def _wait(handles: Sequence[Handle], what: str) -> None:
    with span("wait for pipeline", what):
        for handle in handles:
            handle.wait()


def _strided_as(value: Tensor, like: Tensor) -> Tensor:
    """Return ``value`` with the strides of ``like``, as on the sending stage. With other strides, kernels may sum in
    another order.
    """
    if value.stride() == like.stride():
        return value
    return torch.empty_like(like._form, device=value.device).copy_(value) if isinstance(like, OffStageTensor) else value
