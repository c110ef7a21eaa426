"""The number of processes that a command starts on this machine."""

from partita.config.launchers import LaunchEnvironment
from partita.errors import ConfigError
from partita.memory import accelerator


def num_to_start(environment: LaunchEnvironment, asked: int | None, default: int | None = None) -> int:
    """Return the number of processes: --processes (``asked``), else that of a file (``default``), else one per GPU.

    Under a launcher it is 1.

    Raises:
        ConfigError: --processes is given under a launcher, which has already started all processes.
    """
    if environment.world_size == 1:
        return asked or default or max(1, accelerator.count())
    if asked is None:
        return 1
    raise ConfigError(
        f"--processes {asked}: a launcher has already started this process as one of {environment.world_size}; leave "
        "--processes out"
    )
