"""The checkpoints of one engine: saved on schedule or on request, and loaded."""

import warnings
from dataclasses import replace
from pathlib import Path

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from partita.checkpoint.backend import Request
from partita.checkpoint.content import Content
from partita.checkpoint.format.backend import FileBackend
from partita.checkpoint.load import LoadOptions, Restored, load
from partita.checkpoint.names import AVERAGES
from partita.checkpoint.save import Saver
from partita.checkpoint.training_state import TrainingState
from partita.checkpoint.versions import versions
from partita.config.schema import Config
from partita.errors import ConfigError, PartitaError
from partita.inspection.modules import owning_ranks
from partita.optim.fused import rule_of
from partita.optim.traits import needs_closure
from partita.optim.updater import StepResult, Updater
from partita.parallel.random import RandomStreams
from partita.sharding.runtime import Runtime

# Limit on rewinds without getting past the same step.
MOST_REWINDS = 3


class Checkpoints:
    """Saves and loads one engine. Every method is a collective, called between two steps."""

    def __init__(
        self,
        model: nn.Module,
        runtime: Runtime,
        updater: Updater,
        scheduler: LRScheduler,
        config: Config,
        streams: RandomStreams | None,
    ) -> None:
        self._updater = updater
        self._config = config
        self._mesh = runtime.collectives.mesh
        self._backend = FileBackend(self._mesh)
        self._content = Content(runtime, updater)
        drawn = streams if config.seed is None else None
        local_buffers = config.communication.buffers == "local"
        self._training = TrainingState(model, updater, scheduler, self._mesh, drawn, local_buffers)
        self._saver = Saver(self._content, self._training, self._backend)
        self.extra = self._training.extra
        # Made absolute once: the process may change its working directory.
        self._dir = Path(config.checkpoint.dir).absolute() if config.checkpoint.dir is not None else None
        # The latest step with nonfinite values, and the number of rewinds from that step or an earlier one.
        self._furthest = -1
        self._rewinds = 0

    def after_update(self, result: StepResult) -> StepResult:
        """Save a checkpoint if one is due. Apply ``precision.nonfinite`` if the update was skipped.

        The setting does not apply while the loss scale is dynamic.

        Raises:
            PartitaError: the setting is ``raise``, there is no checkpoint to rewind to, or rewinding does not help.
        """
        policy, section = self._config.precision.nonfinite, self._config.checkpoint
        if result.skipped and policy != "skip" and not self._updater.scale.dynamic:
            problem = f"step {self._updater.steps}: {self._updater.culprit}"
            if policy == "raise":
                raise PartitaError(f"{problem} (precision.nonfinite: raise)")
            return replace(result, rewound_to=self._rewind(problem))
        if section.every_steps and not result.skipped and self._updater.steps % section.every_steps == 0:
            self.save(None)
        return result

    def _rewind(self, problem: str) -> int:
        """Load the newest checkpoint because of ``problem``; return the checkpoint's step."""
        if self._updater.steps > self._furthest:
            self._furthest = self._updater.steps
            self._rewinds = 0
        if self._rewinds == MOST_REWINDS:
            raise PartitaError(
                f"{problem}; training went back {MOST_REWINDS} times (precision.nonfinite: rewind) and did not get "
                f"past step {self._furthest}: load an earlier checkpoint, use other data, or lower optimizer.lr"
            )
        self._rewinds += 1
        try:
            restored = self._load(None, LoadOptions())
        except PartitaError as error:
            raise PartitaError(f"{problem}; training cannot go back (precision.nonfinite: rewind): {error}") from error
        warnings.warn(f"{problem}; training goes back to step {restored.step}", stacklevel=5)
        return restored.step

    def save(self, folder: str | Path | None) -> Path:
        """See :meth:`Engine.save`."""
        section = self._config.checkpoint
        if needs_closure(self._updater.optimizer):
            raise PartitaError(
                f"engine.save: optimizer {type(self._updater.optimizer).__name__} evaluates the loss in its step, so "
                "the engine does not know which states it keeps, and a checkpoint would lack some; save the model "
                "alone, by engine.state_dict()"
            )
        folder = self._folder(folder, "engine.save").absolute()
        self._updater.take_written()
        self._updater.views.attach(self._updater.optimizer)  # groups that were added after the last step
        runtime = self._content.runtime
        self._updater.prepare_for_checkpoint()
        self._training.owning_rank = owning_ranks(runtime.model, runtime.collectives.all_ranks, shared=runtime.runs_all)
        self._training.compare_ranks(runtime.collectives.all_ranks)
        about = {
            "versions": versions(),
            "ranks": self._mesh.num_ranks,
            "config": self._config.model_dump(mode="json"),
            "optimizer": rule_of(self._updater.optimizer),
            AVERAGES: self._content.averages,
        }
        steps, aliases = self._updater.steps, self._content.aliases()
        return self._saver.save(Request(folder, steps, section.keep, section.background, about, aliases))

    def load(self, folder: str | Path | None, options: LoadOptions) -> Restored:
        """See :meth:`Engine.load`."""
        self._furthest = -1
        self._rewinds = 0
        return self._load(folder, options)

    def _load(self, folder: str | Path | None, options: LoadOptions) -> Restored:
        self._saver.wait()
        self._updater.take_written()
        self._updater.views.attach(self._updater.optimizer)  # groups that were added before the first step
        folder = self._folder(folder, "engine.load")
        return load(self._content, self._training, self._backend, folder, options)

    def _folder(self, folder: str | Path | None, call: str) -> Path:
        found = Path(folder) if folder else self._dir
        if found is None:
            raise ConfigError(f"{call}: name a folder, or set checkpoint.dir")
        return found

    def wait(self) -> None:
        """Wait until the checkpoint that is written in the background is visible."""
        self._saver.wait()
