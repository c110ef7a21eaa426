"""Opening of a checkpoint folder of partita, torch.distributed.checkpoint or FSDP."""

from pathlib import Path

from partita.checkpoint.backend import Stored
from partita.checkpoint.external.fsdp import is_fsdp, open_fsdp
from partita.checkpoint.format.folder import find_checkpoint
from partita.checkpoint.format.stored import open_stored
from partita.checkpoint.format.system import explain_os_errors


def has_checkpoint(folder: Path) -> bool:
    """Return whether :func:`open_any` finds a checkpoint, which may be damaged."""
    with explain_os_errors(folder):
        return is_fsdp(folder) or find_checkpoint(folder) is not None


def open_any(folder: Path) -> Stored:
    """Open a checkpoint that an engine can load.

    It is partita's (``folder`` itself, or the one in it that was saved last), one of torch.distributed.checkpoint, or
    an FSDP folder of accelerate or the Trainer.

    Raises:
        PartitaError: there is none, or it is damaged.
    """
    with explain_os_errors(folder):
        return open_fsdp(folder) or open_stored(folder)
