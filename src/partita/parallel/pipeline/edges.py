"""What goes from stage to stage: what the next one lacks of its first block's arguments, and the gradients of that.

Both sides run the model's own forward, so the receiver knows the shapes: micro-batches may have others. Which
of the arguments it lacks depends on their form alone, and is asked for when a form comes for the first time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from partita.comm.group import Group, Handle
from partita.errors import PartitaError
from partita.memory.accelerator import readable
from partita.memory.timeline import span
from partita.parallel.pipeline.absent import Absent, arrived, is_missing
from partita.parallel.pipeline.stage import Arguments, bypasses

PURPOSE = "pipeline"


@dataclass
class Arrival:
    """A floating-point value that has arrived here, and what will be its gradient. It does not hold the value, whose
    graph holds it.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    gradient: Tensor | None = None

    def gradient_or_zeros(self) -> Tensor:
        if self.gradient is None:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return self.gradient


class _Arrive(torch.autograd.Function):
    """A value as one that was computed: it may be changed in place, and its gradient is kept for its sender."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, passed: list[Tensor], arrival: Arrival) -> Tensor:
        ctx.arrival = arrival
        return passed.pop()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.arrival.gradient = gradient
        return None, None, None


@dataclass
class Edges:
    """Those of one stage of this rank, ``stage`` of ``num_stages``; ``group`` is that of the pipeline."""

    group: Group
    stage: int
    num_stages: int
    device: torch.device
    _asked: dict[object, tuple[int, ...]] = field(default_factory=dict)  # of the next stage
    _lacked: dict[object, tuple[int, ...]] = field(default_factory=dict)  # here
    _sent: list[list[Handle]] = field(default_factory=list)  # forward, by micro-batch
    _sent_back: list[list[Handle]] = field(default_factory=list)
    _num_back: int = 0  # backwards of which that is over

    @property
    def _before(self) -> int:
        return (self.stage - 1) % self.group.size

    @property
    def _behind(self) -> int:
        return (self.stage + 1) % self.group.size

    # ------------------------------------------------------------------------- forward

    def send(self, arguments: Arguments, training: bool, reader: str) -> list[Tensor]:
        """Send the next stage what it lacks of the arguments of its block ``reader``; returns the floating-point ones.

        Raises:
            PartitaError: this rank does not have one of them.
        """
        form = arguments.form, training
        num = len(arguments.leaves)
        if form not in self._asked:
            request = torch.empty(num, dtype=torch.uint8, device=readable(self.device))
            _wait(self.group.receive([request], self._behind, "request", PURPOSE), "request")
            self._asked[form] = tuple(request.nonzero().view(-1).tolist())
        chosen = [arguments.leaves[at] for at in self._asked[form]]
        for leaf in chosen:
            if is_missing(leaf):
                raise bypasses(leaf, f"'{reader}'")
        values = [arrived(leaf) for leaf in chosen]
        handles = self.group.send([value.detach() for value in values], self._behind, "forward", PURPOSE)
        self._sent.append(list(handles))
        return [value for value in values if value.is_floating_point()]

    def receive(
        self, arguments: Arguments, lacking: Sequence[int], training: bool
    ) -> tuple[list[Tensor], list[Arrival]]:
        """Receive the arguments that are lacking; with them, where gradients are on, what will have their gradients.

        Raises:
            PartitaError: they are others than those asked for before, of arguments of the same form.
        """
        form = arguments.form, training
        if form not in self._lacked:
            self._lacked[form] = tuple(lacking)
            request = torch.zeros(len(arguments.leaves), dtype=torch.uint8, device="cpu")
            request[list(lacking)] = 1
            asked = request.to(readable(self.device))
            _wait(self.group.send([asked], self._before, "request", PURPOSE), "what was sent")
        if self._lacked[form] != tuple(lacking):
            raise PartitaError(
                f"stage {self.stage} of the pipeline lacks the arguments {list(lacking)} of its first block, and "
                f"{list(self._lacked[form])} in an earlier call of the same form: a forward may not compute a value of "
                "the blocks' arguments from parameters at one time and from inputs at another"
            )
        shapes = [arguments.leaves[at] for at in lacking]
        values = [torch.empty(tuple(shape.shape), dtype=shape.dtype, device=self.device) for shape in shapes]
        _wait(self.group.receive(values, self._before, "forward", PURPOSE), "forward")
        values = [_strided_as(value, shape) for value, shape in zip(values, shapes, strict=True)]
        if not torch.is_grad_enabled():
            return values, []
        arrivals, anchor = list[Arrival](), torch.zeros((), requires_grad=True, dtype=torch.float32, device="cpu")
        for at, value in enumerate(values):
            if value.is_floating_point():
                arrivals.append(Arrival(value.shape, value.dtype, value.device))
                values[at] = _Arrive.apply(anchor, [value], arrivals[-1])  # type: ignore[no-untyped-call]
        return values, arrivals

    # ------------------------------------------------------------------------ backward

    def send_back(self, arrivals: Sequence[Arrival]) -> None:
        """Send the stage before the gradients of what it sent; zeros where a value was not used."""
        gradients = [arrival.gradient_or_zeros() for arrival in arrivals]
        for arrival in arrivals:
            arrival.gradient = None  # the graph that holds it stays for the weights' gradients, where these come later
        handles = self.group.send(gradients, self._before, "backward", PURPOSE) if gradients else []
        self._sent_back.append(list(handles))

    def receive_back(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Receive the gradients of the floating-point values that were sent, which have left since."""
        gradients = [torch.empty(value.shape, dtype=value.dtype, device=self.device) for value in values]
        _wait(self.group.receive(gradients, self._behind, "backward", PURPOSE), "backward")
        _wait(self._sent.pop(0), "what was sent")
        return gradients

    def wait(self, most: int = 0) -> None:
        """Until what was sent forward has left, but for ``most`` micro-batches."""
        while len(self._sent) > most:
            _wait(self._sent.pop(0), "what was sent")

    def wait_back(self, num: int) -> None:
        """Until the gradients of the batch's first ``num`` micro-batches, which the stage before has had, have left."""
        while self._num_back < num:
            _wait(self._sent_back.pop(0), "what was sent")
            self._num_back += 1

    def end_batch(self) -> None:
        """Until all that was sent has left."""
        self.wait()
        self.wait_back(self._num_back + len(self._sent_back))
        self._num_back = 0

    def abandon(self) -> None:
        """Drop all that was sent, whether it has left or not."""
        self._sent.clear()
        self._sent_back.clear()


def _wait(handles: Sequence[Handle], what: str) -> None:
    with span("wait for pipeline", what):
        for handle in handles:
            handle.wait()


def _strided_as(value: Tensor, like: Tensor) -> Tensor:
    """``value`` with the strides that it has where it was computed: kernels may add in another order elsewhere."""
    if value.stride() == like.stride():
        return value
    return torch.empty_like(like._form, device=value.device).copy_(value) if isinstance(like, Absent) else value
