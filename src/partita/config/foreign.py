"""A file of another library's configuration, of whichever it is."""

from pathlib import Path

from partita.config import accelerate, deepspeed
from partita.config.converted import Converted

# At the top level of every file that `accelerate config` writes; DeepSpeed has none of them.
_ACCELERATES = {"compute_environment", "distributed_type"}


def read_foreign(path: Path, ranks: int, ranks_per_node: int | None = None) -> Converted:
    """What a file of DeepSpeed's or accelerate's means on this number of ranks; what its trainer gives (``"auto"``) is
    left out.

    Raises:
        ConfigError: it cannot be read; or listing each key that cannot be had, with its remedy.
    """
    _, data = deepspeed.load(path)
    if _ACCELERATES & set(data):
        return accelerate.read(path, ranks, ranks_per_node)
    return deepspeed.read(path, ranks, ranks_per_node, arguments={})
