"""Forwards and backwards of a batch's micro-batches on this rank."""

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
from partita.optim.step import StepUpdater
from partita.optim.traits import needs_closure
from partita.optim.updater import StepResult
from partita.parallel.pipeline.schedule import Action, Work
from partita.sharding.reducer import scaled_by

BEFORE_ALL = -1  # smaller than the number of any micro-batch
_INVALID_GRADIENT = re.compile(
    r"Function (\w+) returned an invalid gradient at index \d+ - got \[.*\] but expected shape"
)
LossFn = Callable[[Any, Any], Tensor] | None


class MicroBatches:
    """Runs forwards and backwards, and the update after the last backward of a batch.

    Attributes: ``num``: the micro-batches of a batch; ``done``: the backwards of the batch that are done (on each of
    this rank's stages).
    """

    def __init__(self, parts: Parts, module: nn.Module, num: int, loss_fn: LossFn) -> None:
        self._parts = parts
        self._module = module
        self._loss_fn = loss_fn
        self.num = num
        self._num_backwards = num * parts.pipeline.schedule.shape.chunks
        self._has_failed = False  # the batch of the last call of `train`
        self._schedule = EngineSchedule(parts.scheduler)
        self._needs_closure = needs_closure(parts.optimizer)
        self.begin(0)

    def begin(self, done: int) -> None:
        """Start the next micro-batch, after ``done`` backwards of the batch."""
        self.done = done
        if not done:
            self._parts.runtime.arguments.forget()
        self._parts.parallel.begin_micro_batch(self._parts.updater.steps, done)
        self._parts.runtime.reducer.begin_micro_batch(is_last=done + 1 == self._num_backwards)

    def restored(self) -> None:
        """Start a new batch after a checkpoint was loaded."""
        self._schedule.note()
        self.begin(0)

    def drop(self) -> None:
        """Discard the accumulated gradients, and start a new batch, maybe after an interrupted forward."""
        self._parts.runtime.events.reset()
        self._parts.updater.zero()
        self._has_failed = False
        self.begin(0)

    def check_between_batches(self, call: str, remedy: str) -> None:
        """Check that ``call`` is not inside a batch. Discard the gradients of a failed :meth:`train` first.

        Raises:
            PartitaError: a batch is in progress.
        """
        if self._has_failed:
            self.drop()
        if self.done:
            raise PartitaError(
                f"{call}() after micro-batch {self.done} of {self.num}: the accumulated gradients would be lost; "
                f"{remedy}"
            )

    # ---------------------------------------------------------------- one micro-batch

    def backward(self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Run the backward of ``roots``: of a loss, whose gradient is None, or of outputs with their ``gradients``."""
        if gradients == [None] and not self._parts.pipeline.is_cut:  # stages before the last one do not know the loss
            self._parts.updater.scale.carry(roots[0])
        with self._reduce_pass():
            self._run(roots, gradients)

    @contextmanager
    def _reduce_pass(self) -> Iterator[None]:
        """Enclose the backward of a micro-batch. Afterwards reduce its gradients if the backward has not."""
        reducer = self._parts.runtime.reducer
        num_passes = reducer.num_passes
        with scaled_by(self._parts.updater.scale.value):
            yield
        if reducer.num_passes == num_passes:
            reducer.end_pass()

    def _run(self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        parts = self._parts
        parts.gathered.check_backward()
        parts.runtime.train_unfrozen()
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
                    "full parameter, which parallel.tensor splits between the ranks; exclude its module from the split "
                    '(parallel.tensor_rules: {"lm_head": whole}, by class name or name pattern), or compute with the '
                    f"module itself. Autograd: {error}"
                ) from error
            if "modified by an inplace operation" not in str(error):
                raise
            raise PartitaError(
                "backward: values of its forward were overwritten; after engine.step() run the forward again before "
                f"the next backward. Autograd: {error}"
            ) from error

    def step_by_closure(self, closure: Callable[[], Any]) -> StepResult:
        """Run a step with an optimizer that is given a closure, which runs forward and backward and returns the loss.

        Raises:
            PartitaError: a batch has several micro-batches, or updates are made in backward.
        """
        parts, updater = self._parts, self._parts.updater
        if self.num > 1 or not isinstance(updater, StepUpdater):
            key = "batch.accumulate: 1" if self.num > 1 else "precision.gradients: fp32"
            raise PartitaError(f"engine.step(closure): a closure evaluates the loss of a full batch; set {key}")
        if not self._needs_closure:
            torch.enable_grad()(closure)()
            return self.end()

        def evaluate() -> Any:
            self.begin(0)
            loss = closure()
            parts.activations.check()
            parts.runtime.end_micro_batch()
            return loss

        self._schedule.check()
        return self._updated(updater.update_by_closure(evaluate))

    def end(self) -> StepResult:
        """End a micro-batch. After the last one clip gradients, update the parameters, and zero the gradients."""
        parts = self._parts
        done = self.done + 1
        if done == self._num_backwards:
            parts.runtime.unsharder.within_batch = False
            parts.activations.check()
        parts.runtime.end_micro_batch()
        if done < self._num_backwards:
            result = StepResult(False, None, parts.updater.scale.value, False, parts.updater.rates)
        else:
            if self._needs_closure:
                raise PartitaError(
                    f"{type(parts.optimizer).__name__} evaluates the loss in its step: call engine.step(closure) with "
                    "a closure that runs engine.backward(loss) and returns the loss"
                )
            self._schedule.check()
            return self._updated(parts.updater.update())
        self.begin(done)
        return result

    def _updated(self, result: StepResult) -> StepResult:
        """Start the next batch after an update."""
        parts = self._parts
        try:
            if result.stepped:
                parts.runtime.updated()
                parts.activations.updated()
                self._schedule.step()
                parts.replica_check.after_update(parts.updater.steps)
            return parts.checkpoints.after_update(result)
        finally:  # the batch is over, too, if its checkpoint cannot be saved
            self._schedule.note()
            self.begin(0)

    # ------------------------------------------------------------------------ a batch

    def train(self, drawn: Sequence[Any]) -> tuple[Tensor, StepResult]:
        """Train on a batch's micro-batches; return their mean loss, the same on all stages, and the step's result.

        The gradients of a failed batch are discarded by the next call (see :meth:`check_between_batches`).
        """
        pipeline, losses, unsharder = self._parts.pipeline, dict[int, Tensor](), self._parts.runtime.unsharder
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
                        losses[action.micro] = loss
                        total += loss.detach()
                elif action.work is Work.BACKWARD:
                    self._backward(action, losses.pop(action.micro, None))
                else:
                    self._weight_gradients(action)
                if action.work is pipeline.schedule.last_work:
                    result = self.end()
                del loss
        except BaseException:
            self._has_failed = True  # do not wait for pending reductions: they may need ranks that continue
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
        """Run a stage's backward, without the weight gradients if the schedule defers them."""
        pipeline, reducer = self._parts.pipeline, self._parts.runtime.reducer
        if pipeline.weights is None:
            pipeline.backward(action, loss, self.backward)
            return
        # Gradients that stay in `.grad` arrive here, not in the reduce pass of the deferred ones.
        with scaled_by(self._parts.updater.scale.value), pipeline.weights.deferring(action.micro) as deferred:
            reducer.gradient_sink = deferred.add_gradient
            try:
                pipeline.backward(action, loss, self._run)
            finally:
                reducer.gradient_sink = None

    def _weight_gradients(self, action: Action) -> None:
        """Compute the weight gradients that a stage's backward has deferred."""
        assert self._parts.pipeline.weights is not None
        deferred = self._parts.pipeline.weights.take(action.micro)
        with self._reduce_pass():
            deferred.run()

    def _begin_forward(self, action: Action) -> None:
        """Select the random numbers of a stage's forward: the same ones as without pipeline stages."""
        step = self._parts.updater.steps
        if self._parts.pipeline.is_cut:
            self._parts.parallel.begin_micro_batch(step, BEFORE_ALL)
        self._parts.parallel.begin_micro_batch(step, action.micro)

    def _compare(self, drawn: Sequence[Any]) -> None:
        """Check that the ranks of a pipeline have the same samples. Without one, each forward of the model does."""
        for batch in drawn if self._parts.pipeline.is_cut else ():
            self._parts.batch_check.check(*arguments(batch))

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
            "detached, are all parameters frozen, or is train_batch called inside torch.no_grad()?"
        )
