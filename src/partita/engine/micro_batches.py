"""The work of a batch's micro-batches on this rank: how many are done, and what comes next."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partita.engine.batches import arguments, call, loss_of
from partita.engine.build import Parts
from partita.errors import PartitaError
from partita.optim.updater import StepResult
from partita.parallel.pipeline.schedule import Action, Work
from partita.sharding.scaled import scaled_by

BEFORE_ALL = -1  # no number of a micro-batch
LossFn = Callable[[Any, Any], Tensor] | None


class MicroBatches:
    """Forwards and backwards, and the update after the last of a batch.

    Attributes: ``num``: micro-batches of a batch; ``done``: how many of its backwards were (of each of this rank's
    stages).
    """

    def __init__(self, parts: Parts, module: nn.Module, num: int, loss_fn: LossFn) -> None:
        self._parts, self._module, self._loss_fn = parts, module, loss_fn
        self.num = num
        self._num_backwards = num * parts.pipeline.schedule.shape.chunks
        self.begin(0)

    def begin(self, done: int) -> None:
        """So many backwards of the batch are done."""
        self.done = done
        self._parts.parallel.begin_micro_batch(self._parts.updater.steps, done)
        self._parts.runtime.reducer.begin_micro_batch(is_last=done + 1 == self._num_backwards)

    # ---------------------------------------------------------------- one micro-batch

    def backward(self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of ``roots``: of a loss (its gradient is None), or of values whose gradients have come."""
        parts = self._parts
        reducer = parts.runtime.reducer
        scale = parts.updater.scale.value
        waves = reducer.waves
        if gradients == [None]:
            reducer.watch(roots[0])
            roots = [roots[0] if scale == 1.0 else roots[0] * scale]
        try:
            with scaled_by(scale), parts.activations.explained():
                if roots:
                    torch.autograd.backward(roots, gradients)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise PartitaError(
                "backward needs values that were overwritten since its forward; after engine.step() run the forward "
                f"again before the next backward. Autograd: {error}"
            ) from error
        if reducer.waves == waves:
            reducer.end_wave()

    def end(self) -> StepResult:
        """The end of a backward; after the last of a batch clip, update the parameters, and zero the gradients."""
        parts = self._parts
        done = self.done + 1
        if done == self._num_backwards:
            parts.runtime.residency.within_batch = False
            parts.activations.check()
        parts.runtime.end_micro_batch()
        if done < self._num_backwards:
            result = StepResult(False, None, parts.updater.scale.value, False, parts.updater.rates)
        else:
            result = parts.updater.update()
            if result.stepped:
                parts.runtime.updated()
                parts.activations.updated()
                parts.scheduler.step()
            result = parts.checkpoints.after_update(result)
        self.begin(done % self._num_backwards)
        return result

    # -------------------------------------------------------------------- a whole batch

    def train(self, drawn: Sequence[Any]) -> tuple[Tensor, StepResult]:
        """Train on a batch's micro-batches; returns the mean of their losses, the same on all stages."""
        pipeline, kept, residency = self._parts.pipeline, dict[int, Tensor](), self._parts.runtime.residency
        total = torch.zeros((), device=self._parts.runtime.executor.device)
        micros = dict(enumerate(drawn))
        result: StepResult | None = None
        self._compare(drawn)
        residency.within_batch = pipeline.is_cut
        try:
            for action in pipeline.order:
                if action.work is Work.FORWARD:
                    self._begin_forward(action)
                    if (loss := self._forward(action, micros)) is not None:
                        kept[action.micro] = loss
                        total += loss.detach()
                else:
                    loss = kept.pop(action.micro) if pipeline.is_last(action) else None
                    pipeline.backward(action, loss, self.backward)
                    result = self.end()
                del loss
        finally:
            residency.within_batch = False
        pipeline.end_batch()
        assert result is not None
        return pipeline.share_loss(total / len(drawn)), result

    @torch.no_grad()
    def evaluate(self, drawn: Sequence[Any]) -> Tensor:
        """The mean loss of micro-batches in evaluation mode, the same on all stages."""
        pipeline, micros, losses = self._parts.pipeline, dict(enumerate(drawn)), list[Tensor]()
        self._compare(drawn)
        training = [module for module in self._module.modules() if module.training]
        self._module.eval()
        try:
            for action in pipeline.order_without_backwards(len(drawn)):
                if (loss := self._forward(action, micros)) is not None:
                    losses.append(loss)
                pipeline.wait_for_sent()
        finally:
            for module in training:
                module.training = True
        pipeline.end_batch()
        return pipeline.share_loss(torch.stack(losses).float().mean() if losses else torch.zeros(()))

    def _begin_forward(self, action: Action) -> None:
        """Say whose random numbers come: those of each stage's forward are of the one forward that they make up."""
        step = self._parts.updater.steps
        if self._parts.pipeline.is_cut:
            self._parts.parallel.begin_micro_batch(step, BEFORE_ALL)
        self._parts.parallel.begin_micro_batch(step, action.micro)

    def _compare(self, drawn: Sequence[Any]) -> None:
        """See that ranks with one data coordinate have the same samples."""
        for batch in drawn:
            self._parts.samples.check(*arguments(batch))

    def _forward(self, action: Action, micros: dict[int, Any]) -> Tensor | None:
        """A stage's forward; the last one's loss."""
        pipeline = self._parts.pipeline
        is_last_use = action.chunk == pipeline.schedule.shape.chunks - 1
        batch = micros.pop(action.micro) if is_last_use else micros[action.micro]
        output = pipeline.forward(action, lambda: call(self._module, batch))
        if not pipeline.is_last(action):
            return None
        loss = loss_of(output, batch, self._loss_fn)
        pipeline.check_arrived(loss)
        return loss
