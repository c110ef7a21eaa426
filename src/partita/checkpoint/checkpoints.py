"""The checkpoints of one engine: made when they are due or asked for, and loaded."""

import warnings
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from partita.checkpoint.beside import Beside
from partita.checkpoint.content import Content
from partita.checkpoint.load import Loader, Restored
from partita.checkpoint.save import Order, Saver
from partita.config.schema import Config
from partita.errors import ConfigError, PartitaError
from partita.optim.updater import StepResult, Updater
from partita.sharding.runtime import Runtime


class Checkpoints:
    """Saves and loads one engine. Every method is a collective, called between two steps."""

    def __init__(self, model: nn.Module, runtime: Runtime, updater: Updater, scheduler: LRScheduler, config: Config):
        self._updater, self._config, self._mesh = updater, config, runtime.collectives.mesh
        self._content = Content(runtime, updater)
        self._beside = Beside(model, updater, scheduler, self._mesh)
        self._saver = Saver(self._content, self._beside)
        self.extra = self._beside.extra

    def after_update(self, result: StepResult) -> StepResult:
        """Save where it is due; where an update was left out, do what ``precision.nonfinite`` says.

        Raises:
            PartitaError: that is to raise, or there is no checkpoint to go back to.
        """
        policy, section = self._config.precision.nonfinite, self._config.checkpoint
        if result.skipped and policy != "skip" and not self._updater.scale.dynamic:
            said = f"step {self._updater.steps}: {self._updater.culprit}"
            if policy == "raise":
                raise PartitaError(f"{said} (precision.nonfinite: raise)")
            restored = self.load(None, only_model=False, strict=True)
            warnings.warn(f"{said}; training goes back to step {restored.step}", stacklevel=4)
            return replace(result, rewound_to=restored.step)
        if section.every_steps and not result.skipped and self._updater.steps % section.every_steps == 0:
            self.save(None)
        return result

    def save(self, folder: str | Path | None) -> Path:
        """See :meth:`Engine.save`."""
        section = self._config.checkpoint
        folder = folder or section.dir
        if folder is None:
            raise ConfigError("engine.save: name a folder, or set checkpoint.dir")
        self._updater.take_written()
        about = {
            "versions": {"partita": _version(), "torch": torch.__version__},
            "ranks": self._mesh.num_ranks,
            "config": self._config.model_dump(mode="json"),
        }
        order = Order(Path(folder), self._updater.steps, section.keep, section.background, about)
        return self._saver.save(order)

    def load(self, folder: str | Path | None, *, only_model: bool, strict: bool) -> Restored:
        """See :meth:`Engine.load`."""
        self._saver.wait()
        self._updater.take_written()
        folder = folder or self._config.checkpoint.dir
        if folder is None:
            raise ConfigError("engine.load: name a folder, or set checkpoint.dir")
        return Loader(self._content, self._beside, Path(folder)).load(only_model=only_model, strict=strict)

    def wait(self) -> None:
        """Wait until what is written in the background is visible."""
        self._saver.wait()


def _version() -> str:
    try:
        return version("partita")
    except PackageNotFoundError:  # used from a checkout
        return "not installed"
