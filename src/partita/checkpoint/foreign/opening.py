"""The checkpoint that a folder is, by whichever library it was written."""

from pathlib import Path

from partita.checkpoint.backend import Stored
from partita.checkpoint.foreign.fsdp import open_fsdp
from partita.checkpoint.format.stored import open_stored
from partita.checkpoint.format.system import explained


def open_any(folder: Path) -> Stored:
    """What an engine loads: partita's checkpoints (the one that ``folder`` is, or the one in it that was saved last),
    those of torch.distributed.checkpoint, and FSDP folders of accelerate and the Trainer.

    Raises:
        PartitaError: there is none, or it is damaged.
    """
    with explained(folder):
        return open_fsdp(folder) or open_stored(folder)
