"""The engine: a model, its plan and its optimizer, behind the calls of a training loop."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from partita.checkpoint.external.opening import has_checkpoint
from partita.checkpoint.load import LoadOptions, Restored
from partita.comm.mesh import Mesh
from partita.comm.synchronization_check import check_synchronized
from partita.comm.values import gather_values
from partita.config.resolve import Resolved, describe
from partita.engine.averages import Averages, Decay, Ema
from partita.engine.batches import draw, draw_for_evaluation, is_scalar
from partita.engine.build import Parts, UserArguments, build
from partita.engine.micro_batches import MicroBatches
from partita.engine.profile import Profile
from partita.errors import PartitaError
from partita.huggingface.export import export
from partita.layout.state_bytes import model_state_bytes
from partita.memory import accelerator
from partita.memory.ledger import MemoryReport
from partita.memory.out_of_memory import report_out_of_memory
from partita.observe.log import MetricsLog
from partita.optim.step import StepUpdater
from partita.optim.updater import StepResult
from partita.table.mesh_shape import AXES, BATCH_AXES
from partita.table.state_plan import StatePlan
from partita.table.traffic import TrafficReport

_NUM_SETTINGS = 4  # lines of the start that `repr` shows: mesh, sharding, batch, precision


class Engine:
    """The training engine of a model, made by :func:`initialize`.

    Methods are collectives, which all ranks must call, except :meth:`train`, :meth:`eval`, :meth:`log`,
    :meth:`parameters`, :meth:`explain`, :meth:`profile` and the reports. Properties are not collectives.

    Attributes:
        module: the model.
        optimizer: a ``torch.optim.Optimizer``.
        scheduler: the learning-rate scheduler.
        config: the configuration.
        mesh: the device mesh.
        blueprint: the plan that the engine is built from, which :mod:`partita.layout` reads.
        units: the planned units of the blueprint.
        last_step: the result of the last :meth:`step` or :meth:`train_batch`, with gradient norm and learning rates.
        plan: each unit's row of the residence table, by unit name. The root unit is called ``""``.
        extra: the caller's plain values, such as the position in the data. Checkpoints save them, and :meth:`load`
            restores them.
    """

    def __init__(self, model: nn.Module, resolved: Resolved, mesh: Mesh, given: UserArguments) -> None:
        self.module = model
        self.config = resolved.config
        self.mesh = mesh
        self._log = MetricsLog(resolved.config, mesh.rank == 0)
        self._closed = False
        self._closed_by = ""
        self._parts = parts = build(model, resolved, mesh, given)
        self.optimizer = parts.optimizer
        self.scheduler = parts.scheduler
        self.blueprint = parts.blueprint
        self.units = list(parts.blueprint.units)
        self.plan: dict[str, StatePlan] = {unit.name: unit.row for unit in self.units}
        self.extra = parts.checkpoints.extra
        self.last_step = StepResult(stepped=False)
        num_params = sum(info.param.numel() for info in parts.whole.infos)
        title = f"Engine of {type(model).__name__}: {num_params:,} parameters in {len(self.units)} units"
        self._description = [title, *describe(resolved).splitlines()[:_NUM_SETTINGS]]
        self._oom_reporter = parts.oom_reporter
        self._micro_batches = MicroBatches(parts, model, resolved.batch.accumulate, given.loss_fn)
        self._averages = Averages(parts.runtime, parts.updater, self._micro_batches.check_between_batches)
        self._made_mesh = mesh.add_engine()

    def __repr__(self) -> str:
        title, *settings = self._description
        return "\n".join([f"{title}, {'closed' if self._closed else f'step {self.global_step}'}", *settings])

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return self.mesh.device

    @property
    def rank(self) -> int:
        """The number of this rank in the mesh."""
        return self.mesh.rank

    @property
    def is_main(self) -> bool:
        """True on rank 0, which prints and logs."""
        return self.mesh.rank == 0

    @property
    def global_step(self) -> int:
        """The number of complete batches so far, with those whose update was skipped. Checkpoints restore it."""
        return self._parts.updater.steps

    # ------------------------------------------------------------------ training

    @report_out_of_memory("forward")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward. Under ``precision.mode: cast``, inputs are cast to the compute dtype.

        Raises:
            PartitaError: the model is split into pipeline stages (``parallel.pipeline``) outside
                :meth:`gathered`, or ranks of one data coordinate have different inputs.
        """
        parts = self._open()
        if not parts.gathered.num_open:
            self._check_no_stages("engine(...)")
        return self.module(*args, **kwargs)

    @report_out_of_memory("backward")
    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss`` (a scalar), averaged over the ranks and divided by ``batch.accumulate``.

        Raises:
            PartitaError: ``loss`` is not a scalar that depends on the parameters, they were updated since its forward,
                or the model is split into pipeline stages (``parallel.pipeline``).
        """
        self._open()
        self._averages.check_none_applied("engine.backward")
        self._check_no_stages("engine.backward")
        if not is_scalar(loss) or not loss.requires_grad:
            got = f"a {type(loss).__name__}" + (": pass its .loss" if hasattr(loss, "loss") else "")
            if isinstance(loss, Tensor):
                got = f"one of shape {tuple(loss.shape)} with requires_grad {loss.requires_grad}"
            raise PartitaError(f"engine.backward: expected a scalar loss that depends on the parameters; got {got}")
        self._micro_batches.backward([loss], [None])

    @report_out_of_memory("step")
    def step(self, closure: Callable[[], Any] | None = None) -> StepResult:
        """End a micro-batch. After the last of a batch, clip gradients, update the parameters, and zero gradients.

        Args:
            closure: runs forward and :meth:`backward`, and returns the loss. Optimizers that evaluate the loss in their
                step (LBFGS, SAM) need it; they get the mean loss over the ranks, at ``zero.stage: 0``.
        """
        parts = self._open()
        if parts.gathered.num_open:
            raise PartitaError("engine.step() inside engine.gathered(...): leave the block first")
        self._averages.check_none_applied("engine.step")
        self._check_no_stages("engine.step")
        batches = self._micro_batches
        return self._record(batches.end() if closure is None else batches.step_by_closure(closure))

    @report_out_of_memory("train_batch")
    def train_batch(self, iterator: Iterator[Any] | Sequence[Any]) -> Tensor:
        """Train on one global batch: draw ``batch.accumulate`` micro-batches and return their mean loss over all ranks.

        :attr:`last_step` has the gradient norm, the learning rates, and whether the parameters were updated.

        A micro-batch is a mapping (passed as keyword arguments), a tuple or list (as positional arguments), or a
        tensor.

        Args:
            iterator: an iterator that continues from call to call, such as ``iter(loader)``, or a list of exactly the
                micro-batches.

        Raises:
            StopIteration: the iterators of all ranks are empty. No update was made.
            PartitaError: it is not an iterator; it ended inside a batch on some rank (raised on all ranks, without an
                update); the model's output has no loss; or a batch was started by :meth:`step`.
        """
        self._open()
        self._averages.check_none_applied("engine.train_batch")
        self._micro_batches.check_between_batches(
            "engine.train_batch", "complete this batch by engine.step(), or discard it by engine.zero_grad()"
        )
        drawn = draw(iterator, self._micro_batches.num, self.each)
        with self._closed_by_errors():
            loss, result = self._micro_batches.train(drawn)
        self._record(result)
        return self.mean(loss)

    def _record(self, result: StepResult) -> StepResult:
        """Keep the result of a step. If training went back to a checkpoint, the rows of :meth:`log` do, too."""
        self.last_step = result
        if result.rewound_to is not None:
            self._log.resume_at(result.rewound_to)
        return result

    @report_out_of_memory("eval_batch")
    def eval_batch(self, iterator: Iterator[Any] | Sequence[Any], *, local: bool = False) -> Tensor:
        """Return the mean loss of some micro-batches over all ranks, in evaluation mode and without gradients.

        These are ``batch.accumulate`` micro-batches of an iterator (fewer if it ends before), or all of a list.

        Args:
            local: return the mean over this data rank's micro-batches alone.

        Raises:
            StopIteration: the iterators of all ranks are empty.
            PartitaError: it is not an iterator, ranks have different numbers of micro-batches, or the model's output
                has no loss.
        """
        self._open()
        drawn = draw_for_evaluation(iterator, self._micro_batches.num, self.each)
        with self._closed_by_errors():
            loss = self._micro_batches.evaluate(drawn)
        return accelerator.read(loss) if local else self.mean(loss)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank without reducing them, until the next backward outside, or ``step``.

        Allowed at every stage. Stages 2 and 3 then keep this rank's gradients unsharded (as many bytes as the
        parameters in the compute dtype) until they are reduced.

        Raises:
            PartitaError: gradients are not stored (``precision.gradients: in_backward``).
        """
        reducer = self._open().runtime.reducer
        self._check_gradients_stored("engine.no_sync")
        with reducer.no_sync():
            yield

    def clip_grad_norm(self, max_norm: float) -> float:
        """Clip the batch's gradients to a global norm in the next :meth:`step`, instead of ``clip_grad_norm``.

        Call this after the last backward of a batch. It returns the norm before clipping, the same on every rank.

        Raises:
            PartitaError: the batch is not complete, ``max_norm`` is not positive, or gradients are not stored
                (``precision.gradients: in_backward``).
        """
        updater = self._open().updater
        self._check_gradients_stored("engine.clip_grad_norm")
        if not max_norm > 0:
            raise PartitaError(f"engine.clip_grad_norm: expected a positive norm, got {max_norm}")
        micro, num = self._micro_batches.done, self._micro_batches.num
        if micro + 1 < num:
            raise PartitaError(
                f"engine.clip_grad_norm() in micro-batch {micro + 1} of {num}: gradients are clipped after the last "
                "one; call it before the step that updates the parameters"
            )
        assert isinstance(updater, StepUpdater)
        return updater.clip(max_norm)

    def zero_grad(self) -> None:
        """Discard the accumulated gradients. The next micro-batch is the first of a batch."""
        self._open()
        self._micro_batches.drop()

    def train(self, mode: bool = True) -> Self:
        """Set the model's training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Set the model's evaluation mode."""
        return self.train(False)

    def ema(self, decay: Decay, *, name: str = "ema") -> Ema:
        """Start an exponential moving average of the weights, which every update continues. It is sharded.

        Call this before :meth:`resume` or :meth:`load`, which restore the average. ``with ema.applied():`` evaluates
        and exports the averaged weights.

        Args:
            decay: the weight of the earlier average in each update, from 0 to 1; or a function that returns it for a
                value of :attr:`global_step`.
            name: the prefix of the average's keys in checkpoints, from which ``load(..., prefix=name)`` loads it as the
                model's weights.

        Raises:
            PartitaError: the decay or the name is wrong, gradients are not stored (``precision.gradients:
                in_backward``), or replicas train separately (``communication.every``).
        """
        self._open()
        self._check_gradients_stored("engine.ema")
        return self._averages.add(decay, name)

    # ---------------------------------------------------------------- inspection

    def gathered(self, *items: nn.Module | nn.Parameter, modify: bool = False) -> AbstractContextManager[None]:
        """Unshard the parameters of the given modules (default: of the full model) inside a ``with`` block.

        With ``modify`` the values that rank 0 wrote become the values on every rank and in the optimizer. Keep copies
        of values (``param.detach().clone()``), not views. The backward of a loss that is computed inside (a penalty on
        weights) may come after the block: parameters that its graph refers to stay in memory until then.

        Raises:
            PartitaError: an item does not belong to the model, or a parameter was written without ``modify``.
        """
        if modify:
            self._averages.check_none_applied("engine.gathered(modify=True)")
        return self._open().gathered.hold(items or (self.module,), modify)

    def gradient(self, name: str) -> Tensor | None:
        """Return the full mean gradient of a parameter (fp32, its shape) before ``step``; None if no rank has one.

        Raises:
            PartitaError: there is no such parameter, or gradients are not stored (``precision.gradients:
                in_backward``).
        """
        parts = self._open()
        self._check_gradients_stored("engine.gradient")
        return parts.whole.gradient(name, parts.updater.gradient_scale())

    def optimizer_state(self, name: str) -> dict[str, Tensor]:
        """Return the full optimizer state of a parameter by key (``exp_avg``, ``step``, ...)."""
        return self._open().whole.optimizer_state(name)

    def state_dict(self, *, trainable: bool = False, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Return the model's full state dict on the host of rank 0; on other ranks, return an empty dictionary.

        It contains master weights and modules' extra states, but no quantized parameters. Only units with requested
        parameters are gathered.

        Args:
            trainable: only the parameters that require gradients (adapters).
            names: only the entries with these names, the same on every rank. An unknown name is a PartitaError.
        """
        self.check_synchronized("engine.state_dict")
        return self._open().whole.state_dict(trainable=trainable, names=names)

    def export(self, folder: str | Path, companions: str | Path | None = None) -> None:
        """Write the weights in the compute dtype as safetensors, in Hugging Face's layout.

        Configuration and tokenizer are copied from the folder ``companions`` (None: the folder that was passed as
        ``weights=``, if it still exists).
        """
        self.check_synchronized("engine.export")
        parts = self._open()
        found = parts.weights if parts.weights is not None and parts.weights.is_dir() else None
        export(parts.whole, self.module, Path(folder), found if companions is None else Path(companions))

    def save(self, folder: str | Path | None = None) -> Path:
        """Save a checkpoint of the complete training state as ``folder/step-N``; return its path.

        Any number of ranks, ZeRO stage, tiers and precision can load it, and so can torch.distributed.checkpoint. The
        last ``checkpoint.keep`` checkpoints are kept. With ``checkpoint.background`` it becomes visible some time after
        this returns (see :meth:`wait_for_checkpoint`).

        Args:
            folder: the folder of this run's checkpoints; None: ``checkpoint.dir``.

        Raises:
            PartitaError: on all ranks: this checkpoint, or the previous one in the background, cannot be written; or
                gradients of an incomplete batch would be lost.
        """
        self.check_synchronized("engine.save")
        parts = self._open()
        self._averages.check_none_applied("engine.save")
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

        Checkpoints of torch.distributed.checkpoint (from FSDP2, ...) with the same names are loaded too. The
        optimizer's settings are restored, except those that are configured differently now than in the saved run; a
        warning names them (a learning rate keeps its place on the schedule's curve).

        Args:
            folder: None: ``checkpoint.dir``.
            only_model: do not load optimizer, scheduler, counters and random states.
            strict: raise an error if names are missing or unexpected. If it is False, load the matching entries, and
                report the difference.
            prefix: the key prefix of the weights, if the checkpoint has several copies (``"ema"``), or if this model is
                a submodule of the saved one (``"model.encoder"``). None: ``"model"``, or the only prefix.

        Raises:
            PartitaError: on all ranks: there is no checkpoint, a file is damaged, it does not match the model, or it
                has several copies of the weights.
        """
        self._averages.check_none_applied("engine.load")
        self.zero_grad()
        restored = self._parts.checkpoints.load(folder, LoadOptions(only_model, strict, prefix))
        self._micro_batches.restored()
        if not (restored.only_model or restored.only_states):  # these leave global_step as it is
            self._log.resume_at(self.global_step)
        return restored

    def resume(self, folder: str | Path | None = None) -> Restored | None:
        """Load the newest complete checkpoint in the folder of a run, as :meth:`load` does. Return what was restored,
        or None if the run has saved none yet. It then starts again, and its rows of :meth:`log` replace earlier ones.

        Args:
            folder: the folder of a run, or one checkpoint; None: ``checkpoint.dir``.
        """
        found = folder if folder is not None else self.config.checkpoint.dir
        if found is not None and not self.any(has_checkpoint(Path(found))):
            self._log.start_again()
            return None
        return self.load(found)

    def log(self, values: Mapping[str, Tensor | float]) -> None:
        """Write metrics of :attr:`global_step` to ``metrics.jsonl`` in the folder ``metrics.dir``, and to
        ``metrics.sinks``.

        Rank 0 writes its own values; other ranks may call this or not. :meth:`mean` and :meth:`gather` combine values
        of all ranks.

        Args:
            values: numbers and tensors with one element, by name. Reading a tensor waits for the device.

        Raises:
            ConfigError: ``metrics.dir`` is not set.
            PartitaError: a value is not a number, the files cannot be written, or ``metrics.dir`` has the metrics of a
                run that was not resumed.
        """
        self._open()
        self._log.write(values, self.global_step)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the model's parameters; under ZeRO they may be sharded (see :meth:`gathered`)."""
        return self.module.parameters()

    def barrier(self) -> None:
        """Wait until every rank has called this.

        Raises:
            PartitaError: within seconds, if a rank waits in another collective instead.
        """
        self.check_synchronized("engine.barrier")

    def gather(self, values: Tensor) -> Tensor:
        """Concatenate tensors of all data-parallel ranks along dim 0, in rank order; for metrics, on every rank.

        Args:
            values: ``[n, ...]``; ``n`` may differ between the ranks. Ranks of one data coordinate have the same values.

        Returns:
            ``[sum of n, ...]``, on the device of ``values``, without a graph.

        Raises:
            PartitaError: it is a scalar, or the ranks have tensors of other shapes or dtypes.
        """
        return gather_values(values, self._open().runtime.collectives.group(("data",)), "engine.gather")

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank: any Python value that can be pickled, with tensors in host memory.

        Args:
            value: on other ranks, anything: it is ignored.

        Raises:
            PartitaError: on all ranks: the value cannot be pickled.
        """
        return self._open().runtime.collectives.all_ranks.broadcast_object(value, "engine.broadcast")

    def each(self, value: Tensor | float) -> list[float]:
        """Gather a number from every rank, in rank order."""
        return self._numbers(value, AXES)

    def mean(self, value: Tensor | float) -> Tensor:
        """Return the mean of a number over the data-parallel ranks."""
        every = self._numbers(value, BATCH_AXES)
        return torch.tensor(sum(every) / len(every), dtype=torch.float32, device="cpu")

    def _numbers(self, value: Tensor | float, axes: tuple[str, ...]) -> list[float]:
        group, call = self._open().runtime.collectives.group(axes), "a number of every rank"
        local = group.read(torch.as_tensor(value, dtype=torch.float64), call).view(1)
        every = group.exchange(local, call).wait()
        return [float(number) for number in every.view(-1).tolist()]

    def any(self, flag: bool) -> bool:
        """Return True if ``flag`` is set on any rank."""
        return any(self.each(float(flag)))

    def check_synchronized(self, call: str) -> None:
        """Wait until every rank has reached ``call`` (a name of at most 40 letters).

        Raises:
            PartitaError: within seconds, if a rank waits in another collective instead. The message shows where.
        """
        check_synchronized(self._open().runtime.collectives.all_ranks, self.mesh.watchdog, call)

    def explain(self) -> str:
        """Describe how the parallel axes split the model: a line per module with parameters, with its rule."""
        return "\n".join(self._parts.parallel.lines) or f"every rank computes all of {type(self.module).__name__}"

    def memory_report(self) -> MemoryReport:
        """Return this rank's current and peak bytes by state and tier, and the bytes that its disk tier has moved."""
        self._parts.updater.wait_for_updates()
        memory = self._parts.runtime.memory
        return memory.ledger.report(self.mesh.device, memory.disk_report())

    @property
    def planned_bytes(self) -> dict[tuple[str, str], int]:
        """The bytes of this rank's model states after every parameter was updated, by state and tier."""
        return model_state_bytes(self.units, self.mesh.rank, self.blueprint.moments)

    def traffic_report(self) -> TrafficReport:
        """Return the bytes that this rank has sent and the number of its calls, by collective, axis and purpose."""
        self._parts.updater.wait_for_updates()
        return self._parts.runtime.collectives.meter.report()

    def profile(self, path: str | Path) -> Profile:
        """Profile the steps inside a ``with`` block: see :class:`Profile`. This is not a collective."""
        return Profile(Path(path), self.mesh.device, self.mesh.rank, lambda: self._parts.updater.steps)

    # ----------------------------------------------------------------------- end

    def close(self, *, whole: bool = False, dtypes: Mapping[str, torch.dtype] | None = None) -> None:
        """Remove the hooks. The last engine on a mesh also destroys its process groups.

        Args:
            whole: also make the model an ordinary module again: every rank gets all parameters, unsharded, in the
                compute dtype, in separate memory on its device.
            dtypes: with ``whole``, the dtypes of parameters by name, such as those before :func:`initialize`; all
                parameters then get the values of their master weights.

        Raises:
            PartitaError: with ``whole``, on all ranks: one of them has too little memory, or a context of
                :meth:`gathered` is active. The engine stays open.
        """
        if self._closed:
            return
        parts = self._parts
        if whole and parts.gathered.num_open:
            raise PartitaError("engine.close(whole=True) inside engine.gathered(...): leave the block first")
        parts.updater.wait_for_updates()
        parts.runtime.reducer.drain()
        copies = parts.whole.copies(dtypes) if whole else []
        try:
            parts.runtime.unsharder.reset()  # gathers in progress must end before their connections
            parts.checkpoints.wait()
            if self.mesh.has_last_engine:
                self.mesh.finish()
        finally:
            parts.whole.leave(copies)
            self._end()

    def _end(self, *, failed: bool = False) -> None:
        self._closed = True
        try:
            self._parts.updater.close()
            self._parts.parallel.transforms.undo()
            self._parts.runtime.close()
            self._log.close()
        finally:
            # The other engines' pending collectives may never end after an error of the first one.
            self.mesh.remove_engine(closes=failed and self._made_mesh)

    def _fail(self, error: BaseException) -> None:
        """Close the engine after an error. Do not wait for pending operations, which other ranks may never finish.

        Ranks that wait for this one raise an error with this one's message.
        """
        if self._closed:
            return
        if self.mesh.watchdog is not None:
            self.mesh.watchdog.ended(error)
        self._parts.pipeline.abandon()
        self.mesh.abort()
        with suppress(PartitaError):  # the last rows of `log` cannot be written; ``error`` has come first
            self._end(failed=True)

    @contextmanager
    def _closed_by_errors(self) -> Iterator[None]:
        """Close the engine if an error ends a batch of a pipeline.

        The other stages wait for this one, and pending messages between them would be received in the next batch.
        """
        try:
            yield
        except BaseException as error:
            if self._parts.pipeline.is_cut:
                first = str(error).partition("\n")[0]
                self._closed_by = f" by an error inside a batch of the pipeline ({type(error).__name__}: {first})"
                self._fail(error)
            raise

    def _check_no_stages(self, call: str) -> None:
        if self._parts.pipeline.is_cut:
            raise PartitaError(
                f"{call}: the model is split into {self._parts.pipeline.schedule.shape.num_stages} stages "
                "(parallel.pipeline), and no rank can run all of it; call engine.train_batch(iterator) with "
                "batch.accumulate micro-batches, and engine.eval_batch(iterator)"
            )

    def _check_gradients_stored(self, call: str) -> None:
        if self.config.precision.gradients == "in_backward":
            raise PartitaError(
                f"{call}: with precision.gradients: in_backward, gradients are applied and freed in backward; "
                "set precision.gradients to fp32"
            )

    def _open(self) -> Parts:
        if self._closed:
            raise PartitaError(f"the engine is closed{self._closed_by}: make a new one with partita.initialize")
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
