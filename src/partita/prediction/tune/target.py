"""The target of a tuning: a model, as in ``partita plan``, or a job of ``partita train``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partita.config.load import load_config, read_sections
from partita.config.schema import Config
from partita.config.write import YAML
from partita.errors import ConfigError
from partita.prediction.model_source import ModelSource, read_source
from partita.train.job import Job, load_job
from partita.train.models import build_model

# Standard deviation of the weights. It is small, so that nothing overflows; the results do not matter.
_DEVIATION = 0.02


@dataclass(frozen=True)
class Target:
    """The model or job that is tuned.

    ``text`` names the model or the job's file; ``overrides`` change keys of the job, or of the config.
    """

    text: str
    tokens: int | None = None
    overrides: tuple[str, ...] = ()

    @property
    def is_job(self) -> bool:
        """True if ``text`` names a job's file: YAML, or a JSON file with a job's sections."""
        path = Path(self.text)
        if path.suffix in YAML:
            return True
        if path.suffix != ".json" or not path.is_file():
            return False
        sections, _ = read_sections(path)
        return bool(sections) and sections.keys() <= Job.model_fields.keys()

    def job(self) -> Job | None:
        """Return the job; None if a model is named.

        Raises:
            ConfigError: the file is not a job, or ``tokens`` are given in addition to a job.
        """
        if not self.is_job:
            return None
        if self.tokens is not None:
            raise ConfigError(
                f"--tokens: the tokens of a job's samples are data.sequence; use --set data.sequence={self.tokens}"
            )
        return load_job(self.text, self.overrides)

    def source(self) -> ModelSource:
        """Return the model without weights, and its batches.

        Raises:
            ConfigError: there is no such model or job, or it cannot be built.
        """
        job = self.job()
        return read_source(self.text, self.tokens) if job is None else _of_job(self.text, job)

    def config(self, config: str | Path | Mapping[str, Any] | Config | None) -> Config:
        """Return the config of every trial: the job's engine section, or, for a model, ``config`` with the overrides.

        Raises:
            ConfigError: a config is given in addition to a job, or is invalid.
        """
        job = self.job()
        if job is None:
            return load_config(config, self.overrides)
        if config is not None:
            raise ConfigError(
                f"--config: the job '{self.text}' has the engine's settings; change them there, or with "
                "--set engine.KEY=VALUE"
            )
        return job.engine


def _of_job(name: str, job: Job) -> ModelSource:
    with torch.device("meta"):
        ready = build_model(job.model, job.data, reads_weights=False)
    length = job.data.sequence + (job.data.format == "text")  # samples of a text have one more token to predict

    def batch(samples: int, device: torch.device | str) -> dict[str, Tensor]:
        return ready.inputs(torch.zeros(samples, length, dtype=torch.long, device=device))

    return ModelSource(name, ready.module, batch, job.data.sequence)


def give_values(model: nn.Module) -> None:
    """Give every module a ``reset_parameters`` that fills its tensors when the engine materializes them."""
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False)):
            module.reset_parameters = _filling(module)  # type: ignore[assignment]  # modules may have attributes


def _filling(module: nn.Module) -> Callable[[], None]:
    def fill() -> None:
        with torch.no_grad():
            for param in module.parameters(recurse=False):
                param.normal_(0, _DEVIATION) if param.is_floating_point() else param.zero_()
            for buffer in module.buffers(recurse=False):
                buffer.zero_()

    return fill
