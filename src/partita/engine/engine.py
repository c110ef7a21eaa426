"""The engine: a model, its plan and its optimizer, behind the calls of a training loop."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from partita.checkpoint.load import Restored, Wanted
from partita.comm.mesh import Mesh
from partita.comm.synchronization_check import attend
from partita.config.resolve import Resolved
from partita.engine.batches import draw, draw_for_evaluation, is_scalar
from partita.engine.build import Given, Parts, build
from partita.engine.micro_batches import MicroBatches
from partita.engine.profile import Profile
from partita.errors import PartitaError
from partita.huggingface.export import export
from partita.memory import accelerator
from partita.memory.ledger import MemoryReport
from partita.memory.out_of_memory import explained
from partita.optim.step import StepResult, StepUpdater
from partita.plan.mesh_shape import AXES, BATCH_AXES
from partita.plan.state_plan import StatePlan
from partita.plan.traffic import TrafficReport
from partita.planner.memory import model_state_bytes


class Engine:
    """Trains a model under a plan. Made by :func:`initialize`; every method except the reports is called on all ranks.

    Attributes: ``module`` (the model), ``optimizer`` (a real ``torch.optim.Optimizer``), ``scheduler``, ``config``,
    ``mesh``, and ``blueprint`` (what it is built from, and what :mod:`partita.planner` reads), of that ``units`` (the
    planned units) and ``plan`` (unit name to its row of the residence table; the root unit is called ``""``), ``extra``
    (plain values of the caller's, such as the position in the data, which every checkpoint holds and :meth:`load`
    restores).
    """

    def __init__(self, model: nn.Module, resolved: Resolved, mesh: Mesh, given: Given, owns_mesh: bool) -> None:
        self.module = model
        self.config = resolved.config
        self.mesh = mesh
        self._owns_mesh = owns_mesh
        self._closed = False
        self._closed_by = ""
        self._parts = parts = build(model, resolved, mesh, given)
        self.optimizer = parts.optimizer
        self.scheduler = parts.scheduler
        self.blueprint = parts.blueprint
        self.units = list(parts.blueprint.units)
        self.plan: dict[str, StatePlan] = {unit.name: unit.row for unit in self.units}
        self.extra = parts.checkpoints.extra
        self._shortages = parts.shortages
        self._micro_batches = MicroBatches(parts, model, resolved.batch.accumulate, given.loss_fn)

    # ------------------------------------------------------------------ training

    @explained("forward")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward; inputs are cast to the compute dtype, and compared where ranks share samples.

        Raises:
            PartitaError: the model is cut into stages (``parallel.pipeline``).
        """
        samples = self._open().samples
        self._check_whole("engine(...)")
        samples.check(args, kwargs)
        return self.module(*args, **kwargs)

    @explained("backward")
    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss`` (a scalar), averaged over the ranks and divided by ``batch.accumulate``.

        Raises:
            PartitaError: ``loss`` is no scalar that depends on the parameters, they were updated since its forward, or
                the model is cut into stages (``parallel.pipeline``).
        """
        self._open()
        self._check_whole("engine.backward")
        if not is_scalar(loss) or not loss.requires_grad:
            said = f"a {type(loss).__name__}" + (": pass its .loss" if hasattr(loss, "loss") else "")
            if isinstance(loss, Tensor):
                said = f"one of shape {tuple(loss.shape)} with requires_grad {loss.requires_grad}"
            raise PartitaError(f"engine.backward: expected a scalar loss that depends on the parameters; got {said}")
        self._micro_batches.backward([loss], [None])

    @explained("step")
    def step(self) -> StepResult:
        """End a micro-batch. After the last of a batch, clip gradients, update the parameters, and zero gradients."""
        parts = self._open()
        if parts.gathered.num_open:
            raise PartitaError("engine.step() inside engine.gathered(...): leave the block first")
        self._check_whole("engine.step")
        return self._micro_batches.end()

    @explained("train_batch")
    def train_batch(self, iterator: Iterator[Any] | Sequence[Any]) -> Tensor:
        """Train on one global batch: draw ``batch.accumulate`` micro-batches and return their mean loss over all ranks.

        A micro-batch is a mapping (passed as keywords), a tuple or list (as arguments), or a tensor.

        Args:
            iterator: continues from call to call, as ``iter(loader)`` does; or a list of exactly the micro-batches.

        Raises:
            StopIteration: the iterators of all ranks are empty; nothing was trained on.
            PartitaError: it is no iterator, it ended inside a batch on some rank (raised on all ranks; nothing was
                trained on), the loss cannot be found in the model's output, or a batch is begun by :meth:`step`.
        """
        self._open()
        self._micro_batches.check_between_batches(
            "engine.train_batch", "it trains on whole batches: end this one by engine.step(), or engine.zero_grad()"
        )
        drawn = draw(iterator, self._micro_batches.num, self.each)
        with self._closed_by_errors():
            loss, self.last_step = self._micro_batches.train(drawn)
        return self.mean(loss)

    @explained("eval_batch")
    def eval_batch(self, iterator: Iterator[Any] | Sequence[Any]) -> Tensor:
        """Return the mean loss of some micro-batches over all ranks, in evaluation mode and without gradients.

        These are ``batch.accumulate`` micro-batches of an iterator, fewer if it ends before, or all those of a list.

        Raises:
            StopIteration: the iterators of all ranks are empty.
            PartitaError: it is no iterator, those of the ranks ended after different numbers of micro-batches, or the
                loss cannot be found in the model's output.
        """
        self._open()
        drawn = draw_for_evaluation(iterator, self._micro_batches.num, self.each)
        with self._closed_by_errors():
            loss = self._micro_batches.evaluate(drawn)
        return self.mean(loss)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank without reducing them; the next backward outside, or ``step``, does that.

        Allowed at every stage. Stages 2 and 3 then hold this rank's gradients unsharded (as many bytes as the
        parameters in the compute dtype) until they are reduced.

        Raises:
            PartitaError: gradients are not stored (``precision.gradients: in_backward``).
        """
        reducer = self._open().runtime.reducer
        self._check_gradients_rest("engine.no_sync")
        with reducer.no_sync():
            yield

    def clip_grad_norm(self, max_norm: float) -> float:
        """Clip the batch's gradients, in the next :meth:`step`, to a global norm (in place of ``clip_grad_norm``).

        Called after the last backward of a batch. Returns the norm before clipping, the same on every rank.

        Raises:
            PartitaError: the batch is not complete, ``max_norm`` is not positive, or gradients are not stored
                (``precision.gradients: in_backward``).
        """
        updater = self._open().updater
        self._check_gradients_rest("engine.clip_grad_norm")
        if not max_norm > 0:
            raise PartitaError(f"engine.clip_grad_norm: expected a positive norm, got {max_norm}")
        micro, num = self._micro_batches.done, self._micro_batches.num
        if micro + 1 < num:
            raise PartitaError(
                f"engine.clip_grad_norm() in micro-batch {micro + 1} of {num}: gradients are "
                "clipped when all are there; call it before the step that updates the parameters"
            )
        assert isinstance(updater, StepUpdater)
        return updater.clip(max_norm)

    def zero_grad(self) -> None:
        """Drop the gradients collected so far: the next micro-batch is the first of a batch."""
        self._open()
        self._micro_batches.drop()

    def train(self, mode: bool = True) -> Self:
        """Set the model's training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Set the model's evaluation mode."""
        return self.train(False)

    # ------------------------------------------------------------------- looking

    def gathered(self, *items: nn.Module | nn.Parameter, modify: bool = False) -> AbstractContextManager[None]:
        """Unshard the parameters of the given modules (none: of the full model) inside a ``with`` block.

        With ``modify`` the values that rank 0 wrote become the values on every rank and in the optimizer. Keep copies
        of values (``param.detach().clone()``), not views. The backward of a loss that is computed inside (a penalty on
        weights) may come after the block: parameters that its graph refers to stay in memory until then.

        Raises:
            PartitaError: an item is no part of the model, or a parameter was written without ``modify``.
        """
        return self._open().gathered.hold(items or (self.module,), modify)

    def gradient(self, name: str) -> Tensor | None:
        """Return the full mean gradient of a parameter (fp32, its shape) before ``step``; None if no rank has one.

        Raises:
            PartitaError: there is no such parameter, or gradients are not stored (``precision.gradients:
                in_backward``).
        """
        parts = self._open()
        self._check_gradients_rest("engine.gradient")
        return parts.whole.gradient(name, parts.updater.gradient_scale())

    def optimizer_state(self, name: str) -> dict[str, Tensor]:
        """Return the full optimizer state of a parameter by key (``exp_avg``, ``step``, ...)."""
        return self._open().whole.optimizer_state(name)

    def state_dict(self, *, trainable: bool = False, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Return the model's full state dict (with modules' extra states), of master weights, on the host of rank 0; it
        is empty on the other ranks. Quantized parameters are not in it. Units of which nothing is requested are not
        gathered.

        Args:
            trainable: only the parameters that require gradients (adapters).
            names: only these, the same on every rank; an unknown name is a PartitaError.
        """
        self.attend("engine.state_dict")
        return self._open().whole.state_dict(trainable=trainable, names=names)

    def export(self, folder: str | Path, beside: str | Path | None = None) -> None:
        """Write the weights in the compute dtype as safetensors, in Hugging Face's layout. Configuration and tokenizer
        are taken from the folder ``beside`` (None: the one that ``weights=`` named, if it still exists).
        """
        self.attend("engine.export")
        parts = self._open()
        found = parts.weights if parts.weights is not None and parts.weights.is_dir() else None
        export(parts.whole, self.module, Path(folder), found if beside is None else Path(beside))

    def save(self, folder: str | Path | None = None) -> Path:
        """Save everything that training resumes from as ``folder/step-N``; the last ``checkpoint.keep`` of these are
        kept.

        Any number of ranks, stage, tiers and precision can load it, and so can torch.distributed.checkpoint. With
        ``checkpoint.background`` it is visible some time after this returns (see :meth:`wait_for_checkpoint`).

        Args:
            folder: of this run's checkpoints; None: ``checkpoint.dir``.

        Raises:
            PartitaError: on all ranks: it cannot be written (this one, or the one before that was written in the
                background), or gradients of a batch that is not complete would be lost.
        """
        self.attend("engine.save")
        parts = self._open()
        self._micro_batches.check_between_batches("engine.save", "save after the step that updates the parameters")
        return parts.checkpoints.save(folder)

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint that is written in the background is visible."""
        self._parts.checkpoints.wait()

    def load(
        self,
        folder: str | Path | None = None,
        *,
        only_model: bool = False,
        strict: bool = True,
        prefix: str | None = None,
    ) -> Restored:
        """Load a checkpoint: ``folder`` itself, or the complete ``step-N`` in it that was saved last.

        Checkpoints by torch.distributed.checkpoint (of FSDP2, ...) of a module with the same names are loaded, too. The
        optimizer's settings become those that the saved run had last; settings that are configured differently now than
        for that run stay as configured, and a warning names them (a rate keeps its place on the schedule's curve).

        Args:
            folder: None: ``checkpoint.dir``.
            only_model: leave optimizer, scheduler, counters and random states as they are.
            strict: refuse a checkpoint that lacks something, or has more; off: load what there is, report the
                difference.
            prefix: where the weights are in a checkpoint that holds several copies (``"ema"``), or more than this model
                (``"model.encoder"``); None: ``"model"`` where it is there, else the only one.

        Raises:
            PartitaError: on all ranks: there is none, it is damaged (names the file), it is of another model, or it
                holds several copies of the weights (names their prefixes).
        """
        self.zero_grad()
        restored = self._parts.checkpoints.load(folder, Wanted(only_model, strict, prefix))
        self._micro_batches.restored()
        return restored

    def each(self, value: Tensor | float) -> list[float]:
        """Return a number of every rank, in rank order, on all of them."""
        return self._numbers(value, AXES)

    def mean(self, value: Tensor | float) -> Tensor:
        """Return the mean of a number over the data-parallel ranks."""
        every = self._numbers(value, BATCH_AXES)
        return torch.tensor(sum(every) / len(every), dtype=torch.float32, device="cpu")

    def _numbers(self, value: Tensor | float, axes: tuple[str, ...]) -> list[float]:
        mine = accelerator.read(torch.as_tensor(value, dtype=torch.float64)).view(1)
        every = self._open().runtime.collectives.group(axes).exchange(mine, "a number of every rank").wait()
        return [float(number) for number in every.view(-1).tolist()]

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is set on any rank."""
        return any(self.each(float(flag)))

    def attend(self, call: str) -> None:
        """Wait until every rank has reached ``call`` (a name of at most 40 letters).

        Raises:
            PartitaError: a rank waits in another collective instead; raised within seconds. It shows where.
        """
        attend(self._open().runtime.collectives.all_ranks, self.mesh.watchdog, call)

    def explain(self) -> str:
        """Describe how the parallel axes split the model: a line for each module with parameters, with who decided."""
        return "\n".join(self._parts.parallel.lines) or f"every rank computes all of {type(self.module).__name__}"

    def memory_report(self) -> MemoryReport:
        """Return the bytes that this rank holds, now and at their peak, by state and tier, and those its disk tier has
        moved.
        """
        self._parts.updater.wait_for_updates()
        memory = self._parts.runtime.memory
        return memory.ledger.report(self.mesh.device, memory.disk_report())

    @property
    def planned_bytes(self) -> dict[tuple[str, str], int]:
        """Bytes that this rank's model states take once every parameter was updated, by state and tier."""
        return model_state_bytes(self.units, self.mesh.rank, self.blueprint.num_moments)

    def traffic_report(self) -> TrafficReport:
        """Return the bytes sent by this rank and its calls so far, by collective, axis and purpose."""
        self._parts.updater.wait_for_updates()
        return self._parts.runtime.collectives.meter.report()

    def profile(self, path: str | Path) -> Profile:
        """Profile the steps inside a ``with`` block: see :class:`Profile`. May be called on one rank alone."""
        return Profile(Path(path), self.mesh.device, self.mesh.rank, lambda: self._parts.updater.steps)

    # ----------------------------------------------------------------------- end

    def close(self, *, whole: bool = False) -> None:
        """Remove the hooks, and end the process groups that were started here.

        Args:
            whole: also make the model an ordinary module again: every rank has all parameters, in the compute dtype, in
                memory of their own on its device.

        Raises:
            PartitaError: with ``whole``, on all ranks, the engine staying open: the memory of one does not suffice
                (with the bytes needed and free), or a block of :meth:`gathered` is open.
        """
        if self._closed:
            return
        parts = self._parts
        if whole and parts.gathered.num_open:
            raise PartitaError("engine.close(whole=True) inside engine.gathered(...): leave the block first")
        parts.updater.wait_for_updates()
        parts.runtime.reducer.drain()
        copies = parts.whole.copies() if whole else []
        try:
            parts.runtime.unsharder.reset()  # gathers under way end before their connections do
            parts.checkpoints.wait()
            if self._owns_mesh:
                self.mesh.finish()
        finally:
            parts.whole.leave(copies)
            self._end()

    def _end(self) -> None:
        self._closed = True
        self._parts.updater.close()
        self._parts.parallel.transforms.undo()
        self._parts.runtime.close()
        if self._owns_mesh:
            self.mesh.close()

    def _fail(self, error: BaseException) -> None:
        """Close the engine because of an error, without waiting for operations under way: the other ranks may never
        finish them. Ranks that wait for this one end with an error that names this one's.
        """
        if self._closed:
            return
        if self.mesh.watchdog is not None:
            self.mesh.watchdog.ended(error)
        self._parts.pipeline.abandon()
        self._end()

    @contextmanager
    def _closed_by_errors(self) -> Iterator[None]:
        """Close the engine if an error ends a batch of a pipeline: the other stages wait for this one, and messages
        under way between them would be taken for the next batch's.
        """
        try:
            yield
        except BaseException as error:
            if self._parts.pipeline.is_cut:
                first = str(error).partition("\n")[0]
                self._closed_by = f" by an error inside a batch of the pipeline ({type(error).__name__}: {first})"
                self._fail(error)
            raise

    def _check_whole(self, what: str) -> None:
        if self._parts.pipeline.is_cut:
            raise PartitaError(
                f"{what}: the model is cut into {self._parts.pipeline.schedule.shape.num_stages} stages "
                "(parallel.pipeline), and no rank has all of it; call engine.train_batch(iterator) with "
                "batch.accumulate micro-batches, and engine.eval_batch(iterator)"
            )

    def _check_gradients_rest(self, what: str) -> None:
        if self.config.precision.gradients == "in_backward":
            raise PartitaError(
                f"{what}: under precision.gradients: in_backward gradients are used up as soon as they are reduced; "
                "set precision.gradients to fp32"
            )

    def _open(self) -> Parts:
        if self._closed:
            raise PartitaError(f"the engine is closed{self._closed_by}: make another one with partita.initialize")
        return self._parts

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._fail(error)
