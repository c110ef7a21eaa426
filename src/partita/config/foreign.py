"""A file of another library's configuration, of whichever it is."""

from collections.abc import Mapping
from pathlib import Path

from partita.config import accelerate, deepspeed
from partita.config.converted import Converted

# At the top level of every file that `accelerate config` writes; DeepSpeed has none of them.
_ACCELERATES = {"compute_environment", "distributed_type"}


def read_foreign(path: Path, ranks: int, ranks_per_node: int | None = None) -> Converted:
    """What a file of DeepSpeed's or accelerate's means on this number of ranks.

    What a file of DeepSpeed's leaves out is as DeepSpeed has it by default; where it leaves values to a trainer
    (``"auto"``), it is the trainer's.

    Raises:
        ConfigError: it cannot be read; or listing each key that cannot be had, with its remedy.
    """
    _, data = deepspeed.load(path)
    if _ACCELERATES & set(data):
        return accelerate.read(path, ranks, ranks_per_node)
    return deepspeed.read(path, ranks, ranks_per_node, arguments={} if _left_to_trainer(data) else None)


def _left_to_trainer(value: object) -> bool:
    """Whether a value, or one in a section, is a trainer's to give."""
    return any(map(_left_to_trainer, value.values())) if isinstance(value, Mapping) else value == "auto"
