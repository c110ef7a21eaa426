"""Files that a run writes to its folder, and the check that no other run replaces them by accident."""

import json
from itertools import chain, count
from pathlib import Path

from partita.config.launchers import launch_environment
from partita.errors import ConfigError
from partita.observe.metrics import METRICS_FILE
from partita.train.job import Job

# Written when a run ends.
WEIGHTS, JOB_FILE = "model", "job.yaml"
# Results of a run that has not ended.
_UNFINISHED = [METRICS_FILE]


def check_out(job: Job, *, resumes: bool) -> None:
    """Check that the folder does not hold the results of another run.

    A run that resumes from a checkpoint keeps its folder. So does one that has not ended and is restarted before its
    first checkpoint: by its launcher, or by hand if it has a folder for checkpoints.

    Raises:
        ConfigError: there are results in ``train.out``, and ``train.overwrite`` is off.
    """
    if resumes or job.train.overwrite:
        return
    found = _results(job, job.out)
    if not found or (found == _UNFINISHED and launch_environment().restarts):
        return
    raise ConfigError(
        f"train.out: '{job.out}' holds the results of an earlier run ({', '.join(found)}); pass --overwrite to replace "
        "them, or set train.out to another folder"
    )


def numbered_out(job: Job) -> Path:
    """Return ``train.out``, or the first of the folders NAME-2, NAME-3, ... if it holds the results of another run."""
    numbers = (job.out.with_name(f"{job.out.name}-{number}") for number in count(2))
    return next(folder for folder in chain([job.out], numbers) if not _results(job, folder))


def out_override(folder: Path) -> str:
    """Return the override that sets ``train.out``. The folder is quoted: a plain name may be a number in YAML."""
    return f"train.out={json.dumps(str(folder), ensure_ascii=False)}"


def _results(job: Job, folder: Path) -> list[str]:
    """Return the names of the results of another run in a folder."""
    found = [name for name in (WEIGHTS, JOB_FILE, METRICS_FILE) if (folder / name).exists()]
    return [] if found == _UNFINISHED and job.engine.checkpoint.dir is not None else found
