"""The results of a run: its weights are evaluated on held-out data, or continue a prompt."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from partita.engine.start import initialize
from partita.errors import ConfigError
from partita.observe.progress import notices_on
from partita.train.corpus import load_data, model_inputs, open_batches
from partita.train.job import Job, SampleSection, load_job
from partita.train.models import ReadyModel, build_trained
from partita.train.results import JOB_FILE, WEIGHTS, out_override
from partita.train.sample import write_sample


@dataclass(frozen=True)
class Evaluation:
    """Mean loss on held-out data: ``loss`` in nats per token (``token``: "byte" or "token"), over ``num_tokens``."""

    loss: float
    num_tokens: int
    token: str

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    def __str__(self) -> str:
        bits = f", {self.loss / math.log(2):.4f} bits per byte" if self.token == "byte" else ""
        return (
            f"held-out loss {self.loss:.4f} nats per {self.token}, perplexity {self.perplexity:.4f}{bits}, over "
            f"{self.num_tokens:,} {self.token}s"
        )


def load_trained(source: Path, overrides: Sequence[str] = ()) -> Job:
    """Return the job of a run that has ended, with overrides such as "train.eval_batches=100".

    Args:
        source: the folder of its results, or its job file, whose ``train.out`` (or that of an override) is the folder.

    Raises:
        ConfigError: there are no results, or the job is not valid.
    """
    folder = source if source.is_dir() else load_job(source, overrides).out
    if not (folder / JOB_FILE).is_file() or not (folder / WEIGHTS).is_dir():
        raise ConfigError(
            f"'{folder}' has no results of a run ({JOB_FILE} and {WEIGHTS}/); train first, or name the folder "
            "train.out of a run that has ended"
        )
    return load_job(folder / JOB_FILE, [*overrides, out_override(folder)])


def evaluate(job: Job, console: Console) -> Evaluation:
    """Return the loss of a run's weights on ``train.eval_batches`` batches of held-out data. A collective.

    Raises:
        ConfigError: the job does not fit this number of ranks, its data or its model.
    """
    ready = _frozen(job)
    with notices_on(console):
        corpus = load_data(job.data, ready)
        with (
            initialize(ready.module, config=job.engine, weights=ready.weights) as engine,
            open_batches(corpus, job.data, engine) as batches,
        ):
            loss = engine.eval_batch(list(model_inputs(batches.held_out(job.train.eval_batches), ready))).item()
            return Evaluation(loss, batches.num_held_out(job.train.eval_batches), ready.token)


def continue_prompt(job: Job, sample: SampleSection) -> str:
    """Return ``sample.prompt``, continued by a run's weights, in this process.

    Raises:
        ConfigError: the weights cannot be read.
    """
    ready = _frozen(job)
    with (
        notices_on(Console(quiet=True)),
        initialize(ready.module, weights=ready.weights) as engine,
        engine.gathered(),
    ):
        return write_sample(ready, sample, job.data.sequence)


def _frozen(job: Job) -> ReadyModel:
    """Return the model with the run's weights. Nothing is trained, so no optimizer states are allocated."""
    ready = build_trained(job.model, job.data, job.out / WEIGHTS)
    ready.module.requires_grad_(False)
    return ready
