"""Execution of this rank's stages: forwards and backwards of the micro-batches, in the order of a schedule."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from partita.comm.collectives import Collectives
from partita.layout.off_stage import is_off_stage
from partita.parallel.applied import AppliedParallelism
from partita.parallel.pipeline.cut import modules_outside_blocks
from partita.parallel.pipeline.deferred_gradients import WeightGradients
from partita.parallel.pipeline.early_exit import Arguments, EarlyExit
from partita.parallel.pipeline.edges import Edges, ReceivedInput
from partita.parallel.pipeline.off_stage import OffStageTensor, is_missing
from partita.parallel.pipeline.placeholder_output import PlaceholderOutput
from partita.parallel.pipeline.schedule import Action, Schedule, Shape, Work, make_schedule
from partita.parallel.pipeline.stage import MakePlaceholder, Stages, missing_input_error
from partita.sharding.hooks import EarlyOutput
from partita.table.mesh_shape import PIPELINE_AXES
from partita.transforms.modules import WITHIN_STAGE, Order


@dataclass
class _Kept:
    """The results of a forward that its backward needs: the values that it sent, and records of those it received."""

    sent: list[Tensor] = field(default_factory=list)
    received: list[ReceivedInput] = field(default_factory=list)


class Pipeline:
    """The stages of this rank. Without a pipeline, the full model is the only stage.

    Args:
        parallel: the cut of the model, and the changes to its modules.
        schedule: the schedule of a training batch.
        early_output: passes the output of a forward that ends early to the model's hooks.

    Attributes:
        weights: the deferred weight gradients; None if the schedule computes them in the backward.
    """

    def __init__(
        self,
        model: nn.Module,
        parallel: AppliedParallelism,
        schedule: Schedule,
        collectives: Collectives,
        early_output: EarlyOutput,
        weights: WeightGradients | None = None,
    ) -> None:
        self._model = model
        self._cut = parallel.cut
        self.schedule = schedule
        self._stacks = parallel.stacks
        self._group = collectives.group(PIPELINE_AXES)
        shape, device = schedule.shape, collectives.mesh.device
        self._kept = dict[tuple[int, int], _Kept]()
        self._stages: Stages | None = None
        self.weights = weights
        if (cut := parallel.cut) is not None:
            held = {id(param) for param in model.parameters() if not is_off_stage(param)}
            around = dict(modules_outside_blocks(model, cut.blocks, held))
            placeholder = partial(_placeholder, parallel, device)
            changes = parallel.transforms.at(Order.STAGE)
            assert parallel.block_outputs is not None
            early_exit = EarlyExit(early_output)
            self._stages = Stages(model, cut.blocks, around, placeholder, early_exit, parallel.block_outputs, changes)
            numbers = [shape.stage(self._group.index, chunk) for chunk in range(shape.chunks)]
            self._edges = [Edges(self._group, number, shape.num_stages, device) for number in numbers]
            self._gradients_before = dict(gradients_before(schedule, numbers))

    @property
    def order(self) -> tuple[Action, ...]:
        """The actions of this rank in a training batch."""
        return self.schedule.orders[self._group.index]

    def order_without_backwards(self, num_micros: int) -> tuple[Action, ...]:
        """Return the actions of this rank in an evaluation batch of ``num_micros`` micro-batches."""
        shape = Shape(self.schedule.shape.ranks, num_micros, self.schedule.shape.chunks)
        actions = make_schedule("gpipe", shape).orders[self._group.index]
        return tuple(action for action in actions if action.work is Work.FORWARD)

    @property
    def is_cut(self) -> bool:
        """True if there are several stages."""
        return self._cut is not None

    def is_last(self, action: Action) -> bool:
        """Return whether the action belongs to the stage that computes the loss."""
        shape = self.schedule.shape
        return shape.stage(self._group.index, action.chunk) == shape.num_stages - 1

    # ------------------------------------------------------------------------- forward

    def forward(self, action: Action, call: Callable[[], Any]) -> Any:
        """Run a stage's forward by ``call``, a forward of the model.

        Returns:
            The model's output in the last stage, else None.
        """
        if self._cut is None or self._stages is None:
            return call()
        edges, kept = self._edges[action.chunk], _Kept()
        training = self._model.training
        start, stop = self._cut.block_bounds[edges.stage : edges.stage + 2]

        def receive(arguments: Arguments, missing: Sequence[int]) -> list[Tensor]:
            values, kept.received = edges.receive(arguments, missing, training)
            if torch.is_grad_enabled():
                edges.wait_for_gradients(self._gradients_before[action])
            return values

        output = self._stages.forward(start, stop, call, receive)
        for stack in self._stacks:
            stack.drop_slices()
        if isinstance(output, Arguments):
            kept.sent = edges.send(output, training, self._cut.blocks[stop])
            output = None
        if torch.is_grad_enabled():
            self._kept[action.chunk, action.micro] = kept
        return output

    def check_arrived(self, loss: Tensor) -> None:
        """Check that a loss depends only on values that this stage has.

        Raises:
            PartitaError: it depends on a value of another stage.
        """
        if isinstance(loss, OffStageTensor) and is_missing(loss):
            raise missing_input_error(loss, "the loss")

    # ------------------------------------------------------------------------ backward

    def backward(self, action: Action, loss: Tensor | None, run: Callable[..., None]) -> None:
        """Run a stage's backward, and send the gradients of received values to the previous stage.

        ``run(roots, gradients)`` starts from the ``loss`` in the last stage. In other stages it starts from the values
        that the forward sent, with the gradients that the next stage sends for them.
        """
        if loss is not None:
            run([loss], [None])
        kept = self._kept.pop((action.chunk, action.micro), None)
        if kept is None:
            return
        edges = self._edges[action.chunk]
        if loss is None:
            pairs = zip(kept.sent, edges.receive_gradients(kept.sent), strict=True)
            trained = [(value, gradient) for value, gradient in pairs if value.requires_grad]
            kept.sent.clear()
            run([value for value, _ in trained], [gradient for _, gradient in trained])
        edges.send_gradients(kept.received)

    def wait_for_sent(self) -> None:
        """Limit the unfinished sends of each stage to the number of ranks, because the receivers may be slower."""
        for edges in self._edges if self.is_cut else ():
            edges.wait(self._group.size)

    def end_batch(self) -> None:
        """Wait until all sends have completed."""
        for edges in self._edges if self.is_cut else ():
            edges.end_batch()

    def forget(self) -> None:
        """Drop the stored results of a failed batch."""
        self._kept.clear()
        if self.weights is not None:
            self.weights.forget()

    def abandon(self) -> None:
        """Drop unfinished sends, which keep connections open. Nothing may be sent after this."""
        for edges in self._edges if self.is_cut else ():
            edges.abandon()

    def share_loss(self, total: Tensor) -> Tensor:
        """Return the last stage's ``total`` on all ranks of the pipeline."""
        call = "the loss of a batch"
        every = self._group.exchange(self._group.read(total.float(), call).view(1), call).wait()
        return every[-1, 0]


def gradients_before(schedule: Schedule, stages: Sequence[int]) -> Iterator[tuple[Action, int]]:
    """Yield each forward of a rank's ``stages``, with the number of backwards that the previous stage runs before it.

    When the previous stage sends the forward's inputs, it has already received this number of gradients from this
    stage.
    """
    for chunk, number in enumerate(stages):
        before, rank = divmod(number - 1, schedule.shape.ranks)
        num = 0
        for action in schedule.orders[rank] if number > 0 else ():
            if action.chunk == before:
                num += action.work is Work.BACKWARD
                if action.work is Work.FORWARD:
                    yield Action(Work.FORWARD, action.micro, chunk), num


def _placeholder(parallel: AppliedParallelism, device: torch.device, module: nn.Module, name: str) -> MakePlaceholder:
    placeholder = PlaceholderOutput(
        module,
        name,
        device,
        partial(parallel.transforms.suspended, levels=WITHIN_STAGE),
        parallel.block_outputs,
    )
    stack = next((stack for stack in parallel.stacks if module in stack.blocks.values()), None)
    return placeholder if stack is None else partial(stack.placeholder_output, module, placeholder)
