"""Conversion of another library's configuration file, after detecting the library."""

from collections.abc import Mapping
from pathlib import Path

from partita.config import accelerate, deepspeed
from partita.config.converted import Converted

# Top-level keys of every file that `accelerate config` writes; DeepSpeed has none of them.
_ACCELERATE_KEYS = {"compute_environment", "distributed_type"}


def convert_external(path: Path, ranks: int, ranks_per_node: int | None = None) -> Converted:
    """Convert a file of DeepSpeed or accelerate for this number of ranks.

    Missing keys of a DeepSpeed file have DeepSpeed's defaults. If the file has values that a trainer sets (``"auto"``),
    the trainer sets the missing ones, too.

    Raises:
        ConfigError: the file cannot be read, or keys are not available; the message lists each key with its remedy.
    """
    _, data = deepspeed.load(path)
    if _ACCELERATE_KEYS & set(data):
        return accelerate.read(path, ranks, ranks_per_node)
    return deepspeed.read(path, ranks, ranks_per_node, arguments={} if _has_auto(data) else None)


def _has_auto(value: object) -> bool:
    """Return whether a value, or any value in a section, is ``"auto"``, which means that a trainer sets it."""
    return any(map(_has_auto, value.values())) if isinstance(value, Mapping) else value == "auto"
