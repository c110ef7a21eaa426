"""Files that a run writes to its folder, and the check that no other run replaces them by accident."""

from partita.config.launchers import launch_environment
from partita.errors import ConfigError
from partita.observe.metrics import METRICS_FILE
from partita.train.job import Job

# Written when a run ends.
WEIGHTS, JOB_FILE = "model", "job.yaml"


def check_out(job: Job, *, resumes: bool) -> None:
    """Check that the folder does not hold the results of another run.

    A run that resumes from a checkpoint keeps its folder. So does one that is restarted before its first checkpoint: by
    its launcher, or by hand if it has a folder for checkpoints and has not ended.

    Raises:
        ConfigError: there are results in ``train.out``, and ``train.overwrite`` is off.
    """
    if resumes or job.train.overwrite or launch_environment().restarts:
        return
    found = [name for name in (WEIGHTS, JOB_FILE, METRICS_FILE) if (job.out / name).exists()]
    if not found or (found == [METRICS_FILE] and job.engine.checkpoint.dir is not None):
        return
    raise ConfigError(
        f"train.out: '{job.out}' holds the results of an earlier run ({', '.join(found)}); pass --overwrite to replace "
        "them, or set train.out to another folder"
    )
