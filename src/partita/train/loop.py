"""The training loop of a job, and everything that it writes to ``job.out``.

All ranks run the same loop: they evaluate, stop and export after the same steps. Only the first rank writes.
``metrics.jsonl`` and the sinks of ``train.metrics`` are written during training; ``job.yaml``, ``loss.png``,
``sample.txt`` and the weights in ``model/`` at its end, or (without the sample) after Ctrl-C. With
``engine.checkpoint.dir``, a run that was stopped resumes from its newest checkpoint.
"""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml
from rich.console import Console
from torch import Tensor

from partita.config.launchers import launch_environment
from partita.config.resolve import resolve
from partita.engine.engine import Engine
from partita.engine.start import initialize
from partita.errors import PartitaError
from partita.layout.dtypes import dtype_of
from partita.memory import accelerator
from partita.memory.collector import collector_frozen
from partita.observe.metrics import METRICS_FILE, HeldOutRow, MetricsWriter, TrainRow, read_metrics
from partita.observe.plots import plot_losses
from partita.observe.progress import TrainingProgress, notices_on
from partita.observe.sinks import Run
from partita.observe.utilization import Utilization, peak_flops, training_flops
from partita.table.residence import ENCODINGS
from partita.train.adapters import export_adapters, is_adapted, remove_adapters
from partita.train.corpus import AnyCorpus, load_data, model_inputs, open_batches
from partita.train.data import Batches
from partita.train.interrupt import Interruption, StopRequest
from partita.train.job import Job
from partita.train.models import ReadyModel, build_model
from partita.train.packing import PackedBatches
from partita.train.position import DataPosition, completed
from partita.train.results import JOB_FILE, WEIGHTS, check_out
from partita.train.sample import write_sample
from partita.train.stream import POSITION, DocumentStream
from partita.train.watched_steps import WatchedSteps

# Key in a checkpoint: the digest of the text.
CORPUS = "corpus"


@dataclass(frozen=True)
class Outcome:
    """Result of a run.

    ``interrupted`` is True if a signal ended it; ``held_out_loss`` is the last one, in nats per token; ``out`` is the
    folder.
    """

    steps: int
    interrupted: bool
    held_out_loss: float
    out: Path


@dataclass
class _Meter:
    """Losses and time since the last row."""

    started_s: float = field(default_factory=time.perf_counter)
    losses: list[Tensor] = field(default_factory=list)


def train(job: Job, console: Console) -> Outcome:
    """Run the job on this rank, with the other ranks of the launcher; the first rank shows progress on ``console``.

    Raises:
        ConfigError: the job does not fit this number of ranks, its text or its model.
        PartitaError: the loss is not finite, or ``job.out`` cannot be written.
    """
    ready = build_model(job.model, job.data)
    num_parameters = sum(param.numel() for param in ready.module.parameters())  # before they are sharded
    with notices_on(console):
        corpus = load_data(job.data, ready)
        job = _with_steps(job, corpus)
        with (
            initialize(ready.module, config=job.engine, weights=ready.weights) as engine,
            open_batches(corpus, job.data, engine) as batches,
        ):
            _check_steps(job, engine)
            return _Run(job, ready, batches, engine, console).run(num_parameters)


def _with_steps(job: Job, corpus: AnyCorpus) -> Job:
    """Return the job with a number of steps, if it has a number of epochs.

    These are the steps that a checkpoint has completed, and those for the remaining samples of the epochs.
    """
    if job.train.epochs is None:
        return job
    assert not isinstance(corpus, DocumentStream), "refused by load_job"
    total = resolve(job.engine, launch_environment().world_size, accelerator.device_type()).batch.total
    done = completed(job.engine.checkpoint.dir, total)
    remaining = math.ceil(job.train.epochs * corpus.samples_per_epoch(job.data.sequence)) - done.samples
    return job.with_steps(done.steps + max(0, math.ceil(remaining / total)))


def _check_steps(job: Job, engine: Engine) -> None:
    """Check that all ranks have the same number of steps. A collective.

    Raises:
        PartitaError: on all ranks: they have found different checkpoints.
    """
    steps = engine.each(job.train.steps)
    for rank, other in enumerate(steps):
        if other != steps[0]:
            raise PartitaError(
                f"train.epochs: {steps[0]:g} steps on rank 0 and {other:g} on rank {rank}, which finds another newest "
                f"checkpoint in '{job.engine.checkpoint.dir}'; start the run again when all nodes see the same files"
            )


def explain(job: Job, console: Console) -> None:
    """Show on ``console``, on the first rank, how the parallel axes split the job's model (:meth:`Engine.explain`).

    Raises:
        ConfigError: the job does not fit this number of ranks, or its model.
    """
    ready = build_model(job.model, job.data)
    with notices_on(console), initialize(ready.module, config=job.engine, weights=ready.weights) as engine:
        if engine.mesh.rank == 0:
            console.print(engine.explain(), soft_wrap=True, markup=False, highlight=False)


class _Run:
    def __init__(
        self, job: Job, ready: ReadyModel, batches: Batches | PackedBatches, engine: Engine, console: Console
    ) -> None:
        self._job = job
        self._ready = ready
        self._engine = engine
        mesh = engine.mesh
        self._batches = batches
        self._position = DataPosition(engine.extra, batches.batch.total)
        self._is_first = mesh.rank == 0
        self._progress = TrainingProgress(console if self._is_first else Console(quiet=True), job.train.steps)
        self._start = self._resume()
        self._writer = self._open_writer()
        self._utilization = self._find_utilization()
        self._last_held_out = math.nan
        self._watched = WatchedSteps(engine, job.out, job.train.profile, self._start, job.train.steps)

    def _open_writer(self) -> MetricsWriter | None:
        """Open the metrics writer on the first rank; its error is raised on all ranks."""
        job, writer, error = self._job, None, None
        if self._is_first:
            try:
                check_out(job, resumes=self._start > 0)
                writer = MetricsWriter(Run(job.out, self._start or None, job.model_dump(mode="json")), job.sinks)
            except PartitaError as raised:
                error = raised
        if self._engine.any(error is not None):
            raise error or PartitaError("rank 0 cannot write the metrics: see its error")
        return writer

    def run(self, num_parameters: int) -> Outcome:
        self._print_start(num_parameters)
        try:
            with self._progress, collector_frozen(), Interruption(saves=self._saves) as interruption:
                steps = self._train(interruption)
        finally:
            self._watched.close()
            if self._writer is not None:
                self._writer.close()
        interrupted = interruption.agreed is StopRequest.STOP
        self._finish(steps, interrupted)
        return Outcome(steps, interrupted, self._last_held_out, self._job.out)

    @property
    def _saves(self) -> bool:
        return self._job.engine.checkpoint.dir is not None

    def _resume(self) -> int:
        """Load the newest checkpoint, if there is one; return the number of steps that are done."""
        digest = self._batches.corpus.digest
        restored = self._engine.resume() if self._saves else None
        if restored is None:
            self._engine.extra[CORPUS] = digest
            return 0
        self._progress.print_line(str(restored))
        if self._engine.extra.get(CORPUS, digest) != digest:
            self._progress.print_line(
                f"data: the text or its split has changed since '{restored.path}' was saved: training continues with "
                "the new one, and the held-out text may contain text that was trained on"
            )
        self._engine.extra[CORPUS] = digest
        self._progress.resume_at(restored.step)
        return restored.step

    def _train(self, interruption: Interruption) -> int:
        """Run the steps; return the number of steps that are done."""
        plan = self._job.train
        if self._start % plan.eval_every == 0 or self._start == plan.steps:
            self._evaluate(self._start)
        meter = _Meter()
        step = self._start
        while step < plan.steps and interruption.agreed is not StopRequest.STOP:
            step += 1
            self._watched.before(step)
            step = self._train_step(step, meter)
            if (report := self._watched.after(step)) is not None:
                self._progress.print_line(f"{report}\ntimelines: {self._job.out}/trace-*.json.gz (ui.perfetto.dev)")
            self._progress.step(step)
            interruption.agreed = StopRequest(int(max(self._engine.each(interruption.request))))
            stops = interruption.agreed is StopRequest.STOP
            evaluates = step % plan.eval_every == 0 or step == plan.steps
            if meter.losses and (stops or evaluates or step % plan.log_every == 0):
                self._log(step, meter)
                if evaluates and not stops:
                    self._evaluate(step)
                meter = _Meter()
            if self._saves and (interruption.agreed or step == plan.steps):
                if not self._was_due(step):
                    self._engine.save()
                interruption.saved()
        return step

    def _was_due(self, step: int) -> bool:
        """Return True if the engine itself has saved the last step."""
        every_steps = self._job.engine.checkpoint.every_steps
        return every_steps is not None and step % every_steps == 0 and self._engine.last_step.stepped

    def _train_step(self, step: int, meter: _Meter) -> int:
        """Train on the next batch; return the step that is done. It is an earlier one if training was rewound."""
        extra = self._engine.extra
        place = self._position.advance(step)
        number = place.sample if isinstance(self._batches, PackedBatches) else place.batch
        batch = model_inputs(self._batches.train(number), self._ready)
        stream = extra.get(POSITION)
        loss = self._engine.train_batch(batch)
        rewound_to = self._engine.last_step.rewound_to
        if rewound_to is not None:
            self._position.rewind(place, rewound_to)
            if stream is not None:  # a stream is not rewound either
                extra[POSITION] = stream
            num_undone = step - 1 - rewound_to
            del meter.losses[max(0, len(meter.losses) - num_undone) :]
            if self._writer is not None:
                self._writer.rewind(rewound_to)
            return rewound_to
        meter.losses.append(loss)
        return step

    def _log(self, step: int, meter: _Meter) -> None:
        loss = torch.stack(meter.losses).mean().item()
        elapsed_s = time.perf_counter() - meter.started_s
        steps = len(meter.losses)
        result = self._engine.last_step
        row = TrainRow(
            step=step,
            tokens=step * self._batches.tokens_per_step,
            loss=loss,
            lr=result.lr[0],
            grad_norm=result.grad_norm,
            tokens_per_s=steps * self._batches.tokens_per_step / elapsed_s,
            step_s=elapsed_s / steps,
            memory_bytes=self._memory_of_ranks(),
            mfu=None if self._utilization is None else self._utilization.of(elapsed_s / steps),
        )
        self._progress.row(row)
        self._write(row)
        if not math.isfinite(loss):
            raise PartitaError(
                f"the training loss is {loss} in steps {step - steps + 1} to {step}; lower engine.optimizer.lr "
                f"({self._job.engine.optimizer.lr:g}), lengthen engine.schedule.warmup_steps, or set "
                "engine.clip_grad_norm"
            )

    def _find_utilization(self) -> Utilization | None:
        """Return the meter of utilization.

        Returns None if the peak of any rank's device is not known (all ranks count, or none), and if no rank has the
        full model.
        """
        engine, batch = self._engine, self._batches.batch
        if engine.mesh.size("pipeline") > 1:
            return None
        dtype = dtype_of(ENCODINGS[engine.blueprint.resolved.compute_dtype])
        peaks = engine.each(peak_flops(engine.mesh.device, dtype) or 0.0)
        if not all(peaks):
            return None
        inputs = next(model_inputs(self._batches.held_out(1), self._ready))
        engine.eval()
        micro_flops = training_flops(engine.module, lambda: engine(**inputs))
        engine.train()
        return Utilization(micro_flops * batch.accumulate, sum(peaks) / len(peaks))

    def _memory_of_ranks(self) -> tuple[int, ...]:
        """Return the peak bytes of each rank: of the device's allocator if there is one, else of the process."""
        report = self._engine.memory_report()
        peak = report.device_peak_bytes or report.process_peak_bytes
        return tuple(round(num_bytes) for num_bytes in self._engine.each(peak))

    def _evaluate(self, step: int) -> None:
        inputs = list(model_inputs(self._batches.held_out(self._job.train.eval_batches), self._ready))
        self._last_held_out = self._engine.eval_batch(inputs).item()
        row = HeldOutRow(step, step * self._batches.tokens_per_step, self._last_held_out)
        self._progress.held_out(row)
        self._write(row)

    def _write(self, row: TrainRow | HeldOutRow) -> None:
        if self._writer is not None:
            self._writer.write(row)

    def _print_start(self, num_parameters: int) -> None:
        job, token = self._job, self._ready.token
        self._progress.print_line(
            f"{num_parameters / 1e6:.2f}M parameters, {self._batches.corpus.summary(token)}, {job.train.steps} steps "
            f"of {self._batches.tokens_per_step:,}"
        )
        if job.train.metrics == "auto" and not job.sinks:
            self._progress.print_line("TensorBoard is not installed: no event files")

    def _finish(self, steps: int, interrupted: bool) -> None:
        job, out = self._job, self._job.out
        if is_adapted(self._engine.module):
            export_adapters(self._engine, out / WEIGHTS)
        else:
            self._engine.export(out / WEIGHTS)
        sample = None if interrupted else self._write_sample()
        if not self._is_first:
            return
        if not is_adapted(self._engine.module):
            remove_adapters(out / WEIGHTS)
        self._ready.save_config(out / WEIGHTS)
        (out / JOB_FILE).write_text(
            yaml.safe_dump(job.model_dump(mode="json", exclude={"train": {"overwrite"}}), sort_keys=False),
            encoding="utf-8",
        )
        train_rows, held_out_rows = read_metrics(out / METRICS_FILE)
        title = f"{out.name}: {steps} of {job.train.steps} steps" if interrupted else out.name
        plot_losses(out / "loss.png", train_rows, held_out_rows, title, self._ready.token)
        if sample is not None:
            (out / "sample.txt").write_text(sample, encoding="utf-8")
            self._progress.print_line(f"sample:\n{sample}")
        end = "stopped by a signal" if interrupted else "done"
        self._progress.print_line(f"{end} after step {steps}; results are in {out}")

    def _write_sample(self) -> str | None:
        sample = self._job.train.sample
        if not sample.tokens:
            return None
        if self._engine.mesh.size("pipeline") > 1:
            self._progress.print_line("no sample of text: with pipeline stages, no rank has the full model to write it")
            return None
        with self._engine.gathered(self._engine.module):  # one all-gather for the entire text
            return write_sample(self._ready, sample, self._job.data.sequence)
