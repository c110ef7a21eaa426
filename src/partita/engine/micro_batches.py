"""The work on a batch's micro-batches on this rank, and the count of those that are done."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from partita.engine.batches import arguments, call, loss_of
from partita.engine.build import Parts
from partita.errors import PartitaError
from partita.optim.schedule import EngineSchedule
from partita.optim.step import StepResult
from partita.parallel.pipeline.schedule import Action, Work
from partita.sharding.reducer import scaled_by

BEFORE_ALL = -1  # no number of a micro-batch
_INVALID_GRADIENT = re.compile(
    r"Function (\w+) returned an invalid gradient at index \d+ - got \[.*\] but expected shape"
)
LossFn = Callable[[Any, Any], Tensor] | None


class MicroBatches:
    """Runs forwards and backwards, and the update after the last of a batch.

    Attributes: ``num``: micro-batches of a batch; ``done``: the number of the batch's backwards that are done (on each
    of this rank's stages).
    """

    def __init__(self, parts: Parts, module: nn.Module, num: int, loss_fn: LossFn) -> None:
        self._parts = parts
        self._module = module
        self._loss_fn = loss_fn
        self.num = num
        self._num_backwards = num * parts.pipeline.schedule.shape.chunks
        self._has_failed = False  # the batch of the last call of `train`
        self._schedule = EngineSchedule(parts.scheduler)
        self.begin(0)

    def begin(self, done: int) -> None:
        """Set the number of the batch's backwards that are done, and begin the next micro-batch."""
        self.done = done
        if not done:
            self._parts.runtime.arguments.forget()
        self._parts.parallel.begin_micro_batch(self._parts.updater.steps, done)
        self._parts.runtime.reducer.begin_micro_batch(is_last=done + 1 == self._num_backwards)

    def restored(self) -> None:
        """Note that a checkpoint was loaded: the next micro-batch is the first of the checkpoint's next step."""
        self._schedule.note()
        self.begin(0)

    def drop(self) -> None:
        """Forget the gradients collected so far: the next micro-batch is the first of a batch."""
        self._parts.updater.zero()
        self._has_failed = False
        self.begin(0)

    def check_between_batches(self, call: str, remedy: str) -> None:
        """Check that ``call`` does not come inside a batch. What a failed :meth:`train` has collected is dropped first.

        Raises:
            PartitaError: some micro-batches of a batch are done, and others are not.
        """
        if self._has_failed:
            self.drop()
        if self.done:
            raise PartitaError(
                f"{call}() after micro-batch {self.done} of {self.num}: the gradients collected so far would be lost; "
                f"{remedy}"
            )

    # ---------------------------------------------------------------- one micro-batch

    def backward(self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of ``roots``: of a loss (its gradient is None), or of outputs with their gradients."""
        if gradients == [None] and not self._parts.pipeline.is_cut:  # stages before the last one do not know the loss
            self._parts.updater.scale.carry(roots[0])
        with self._reduce_pass():
            self._run(roots, gradients)

    @contextmanager
    def _reduce_pass(self) -> Iterator[None]:
        """Enclose the backward of a micro-batch; afterwards reduce its gradients if they have to be."""
        reducer = self._parts.runtime.reducer
        num_passes = reducer.num_passes
        with scaled_by(self._parts.updater.scale.value):
            yield
        if reducer.num_passes == num_passes:
            reducer.end_pass()

    def _run(self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        parts = self._parts
        parts.gathered.check_backward()
        if gradients == [None]:
            parts.runtime.reducer.finite.watch(roots[0])
            scale = parts.updater.scale.value
            roots = [roots[0] if scale == 1.0 else roots[0] * scale]
        try:
            with parts.recomputation.explained():
                if roots:
                    torch.autograd.backward(roots, gradients)
        except RuntimeError as error:
            if parts.runtime.collectives.mesh.shape.tensor > 1 and (found := _INVALID_GRADIENT.match(str(error))):
                raise PartitaError(
                    f"backward: the autograd.Function '{found[1].removesuffix('Backward')}' computed the gradient of a "
                    "whole parameter, of which parallel.tensor has a part on each rank; keep the module whose weight "
                    'it is given whole (parallel.tensor_rules: {"lm_head": whole}, by class name or name pattern), or '
                    f"compute with the module itself. Autograd: {error}"
                ) from error
            if "modified by an inplace operation" not in str(error):
                raise
            raise PartitaError(
                "backward needs values that were overwritten since its forward; after engine.step() run the forward "
                f"again before the next backward. Autograd: {error}"
            ) from error

    def end(self) -> StepResult:
        """End a backward; after the last of a batch clip gradients, update the parameters, and zero the gradients."""
        parts = self._parts
        done = self.done + 1
        if done == self._num_backwards:
            parts.runtime.unsharder.within_batch = False
            parts.activations.check()
        parts.runtime.end_micro_batch()
        if done < self._num_backwards:
            result = StepResult(False, None, parts.updater.scale.value, False, parts.updater.rates)
        else:
            self._schedule.check()
            result = parts.updater.update()
            if result.stepped:
                parts.runtime.updated()
                parts.activations.updated()
                parts.alike.after_update(parts.updater.steps)
                self._schedule.step()
            result = parts.checkpoints.after_update(result)
            self._schedule.note()
        self.begin(done % self._num_backwards)
        return result

    # -------------------------------------------------------------------- a whole batch

    def train(self, drawn: Sequence[Any]) -> tuple[Tensor, StepResult]:
        """Train on a batch's micro-batches; return the mean of their losses, the same on all stages, and the step's
        result. What a batch that fails has collected is dropped later on (see :meth:`check_between_batches`).
        """
        pipeline, kept, unsharder = self._parts.pipeline, dict[int, Tensor](), self._parts.runtime.unsharder
        total = torch.zeros((), dtype=torch.float32, device=self._parts.runtime.device)
        micros = dict(enumerate(drawn))
        result: StepResult | None = None
        self._compare(drawn)
        unsharder.within_batch = pipeline.is_cut
        try:
            for action in pipeline.order:
                loss = None
                if action.work is Work.FORWARD:
                    self._begin_forward(action)
                    if (loss := self._forward(action, micros)) is not None:
                        _check_trains(loss)
                        kept[action.micro] = loss
                        total += loss.detach()
                elif action.work is Work.BACKWARD:
                    self._backward(action, kept.pop(action.micro, None))
                else:
                    self._weights(action)
                if action.work is pipeline.schedule.last_work:
                    result = self.end()
                del loss
        except BaseException:
            self._has_failed = True  # reductions under way may need ranks that go on: nothing waits for them here
            raise
        finally:
            unsharder.within_batch = False
            pipeline.forget()
        pipeline.end_batch()
        assert result is not None
        return pipeline.share_loss(total / len(drawn)), result

    @torch.no_grad()
    def evaluate(self, drawn: Sequence[Any]) -> Tensor:
        """Return the mean loss of micro-batches in evaluation mode, the same on all stages."""
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
        return pipeline.share_loss(
            torch.stack(losses).float().mean() if losses else torch.zeros((), dtype=torch.float32, device="cpu")
        )

    def _backward(self, action: Action, loss: Tensor | None) -> None:
        """Run a stage's backward; if the schedule defers the weights' gradients, without those."""
        pipeline, reducer = self._parts.pipeline, self._parts.runtime.reducer
        if pipeline.weights is None:
            pipeline.backward(action, loss, self.backward)
            return
        with pipeline.weights.apart(action.micro) as left:
            reducer.aside = left.add_gradient
            try:
                pipeline.backward(action, loss, self._run)
            finally:
                reducer.aside = None

    def _weights(self, action: Action) -> None:
        """Compute the weights' gradients that a stage's backward has deferred."""
        assert self._parts.pipeline.weights is not None
        left = self._parts.pipeline.weights.take(action.micro)
        with self._reduce_pass():
            left.run()

    def _begin_forward(self, action: Action) -> None:
        """Select the random numbers of a stage's forward: those of the one forward that all stages together make up."""
        step = self._parts.updater.steps
        if self._parts.pipeline.is_cut:
            self._parts.parallel.begin_micro_batch(step, BEFORE_ALL)
        self._parts.parallel.begin_micro_batch(step, action.micro)

    def _compare(self, drawn: Sequence[Any]) -> None:
        """Check that ranks with the same data coordinate have the same samples."""
        for batch in drawn:
            self._parts.samples.check(*arguments(batch))

    def _forward(self, action: Action, micros: dict[int, Any]) -> Tensor | None:
        """Run a stage's forward; return the loss if the stage is the last one."""
        pipeline = self._parts.pipeline
        is_last_use = action.chunk == pipeline.schedule.shape.chunks - 1
        batch = micros.pop(action.micro) if is_last_use else micros[action.micro]
        output = pipeline.forward(action, lambda: call(self._module, batch))
        if not pipeline.is_last(action):
            return None
        loss = loss_of(output, batch, self._loss_fn)
        pipeline.check_arrived(loss)
        return loss


def _check_trains(loss: Tensor) -> None:
    """Check that a loss requires gradients.

    Raises:
        PartitaError: it does not.
    """
    if not loss.requires_grad:
        raise PartitaError(
            "train_batch: expected a loss that depends on the parameters; got one with requires_grad False: is it "
            "detached, are all parameters frozen, or is it called inside torch.no_grad()?"
        )
