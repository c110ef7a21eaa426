"""The position of a run in its data, stored in ``engine.extra``.

It is a number of samples: a run that is resumed with another ``batch.total`` skips and repeats no document.
"""

from pathlib import Path
from typing import Any, NamedTuple

from partita.checkpoint.format.folder import complete_checkpoints
from partita.checkpoint.format.stored import open_stored
from partita.checkpoint.training_state import EXTRA

# Keys in a checkpoint: the samples of the completed steps, and the samples and batches of steps that rewinds undid.
SAMPLES, SKIPPED_SAMPLES, SKIPPED_BATCHES = "samples", "samples_left_out", "batches_left_out"


class Place(NamedTuple):
    """The data of a step: the number of its batch, which counts from 1, and of its first sample, from 0."""

    batch: int
    sample: int


class Completed(NamedTuple):
    """The steps in a checkpoint, and the number of their samples."""

    steps: int
    samples: int


def completed(folder: str | None, total: int) -> Completed:
    """Return what the newest checkpoint in a folder has completed.

    Args:
        folder: None, or without a checkpoint: nothing is completed.
        total: the samples of a step, if the checkpoint does not have their number.
    """
    if folder is None or not complete_checkpoints(Path(folder)):
        return Completed(0, 0)
    stored = open_stored(Path(folder))
    steps = int(stored.manifest.get("step", 0))
    extra = stored.value(EXTRA) if EXTRA in stored.values else {}
    return Completed(steps, extra.get(SAMPLES, steps * total))


class DataPosition:
    """The position of a run in its data.

    Args:
        extra: ``engine.extra``. A rewind restores its number of samples, as that of the steps.
        total: the samples of a step.
    """

    def __init__(self, extra: dict[str, Any], total: int) -> None:
        self._extra = extra
        self._total = total

    def advance(self, step: int) -> Place:
        """Return the data of a step, and count them as completed."""
        skipped = self._extra.get(SKIPPED_BATCHES, 0)
        samples = self._samples(step - 1)
        self._extra[SAMPLES] = samples + self._total
        return Place(step + skipped, samples + self._extra.get(SKIPPED_SAMPLES, skipped * self._total))

    def rewind(self, last: Place, step: int) -> None:
        """Skip all data up to ``last``, after the engine has restored the checkpoint of ``step``."""
        self._extra[SKIPPED_BATCHES] = last.batch - step
        self._extra[SKIPPED_SAMPLES] = last.sample + self._total - self._samples(step)

    def _samples(self, step: int) -> int:
        """Return the number of samples of the first ``step`` steps."""
        samples: int = self._extra.get(SAMPLES, step * self._total)
        return samples
