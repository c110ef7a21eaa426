"""FSDP checkpoints in the layout of accelerate and the Trainer.

Model and optimizer are stored separately, either sharded by torch.distributed.checkpoint (``SHARDED_STATE_DICT``) or in
full by ``torch.save`` (``FULL_STATE_DICT``).
"""

from pathlib import Path

from partita.checkpoint.backend import Stored
from partita.checkpoint.external.torch_files import TorchFiles
from partita.checkpoint.format.manifest import METADATA
from partita.checkpoint.format.stored import StoredFiles
from partita.checkpoint.format.system import damaged
from partita.errors import PartitaError

SHARDED = ("pytorch_model_fsdp_0", "optimizer_0")
FULL = ("pytorch_model_fsdp.bin", "optimizer.bin")
OF_ONE_RANK = "pytorch_model_fsdp*_rank*.bin"


def is_fsdp(folder: Path) -> bool:
    """Return whether a folder is an FSDP checkpoint, which :func:`open_fsdp` opens or refuses."""
    whole = (folder / SHARDED[0] / METADATA, folder / FULL[0])
    return any(path.exists() for path in whole) or any(folder.glob(OF_ONE_RANK))


def open_fsdp(folder: Path) -> Stored | None:
    """Open an FSDP checkpoint: its weights, and its optimizer states if it has any. Return None if it is not one.

    Raises:
        PartitaError: a file is damaged or holds classes that are not loaded, or each rank wrote its own shards.
    """
    model, optimizer = SHARDED
    if (folder / model / METADATA).exists():
        return _sharded(folder, [name for name in SHARDED if (folder / name / METADATA).exists()])
    model, optimizer = FULL
    if (folder / model).exists():
        stored = TorchFiles(folder)
        stored.add_weights(model)
        if (folder / optimizer).exists():
            stored.add_optimizer(optimizer)
        return stored
    if shards := sorted(folder.glob(OF_ONE_RANK)):
        raise PartitaError(
            f"checkpoint: '{shards[0]}' is one rank's shard, which only FSDP on the same number of ranks can read: "
            "save with fsdp_state_dict_type: SHARDED_STATE_DICT or FULL_STATE_DICT"
        )
    return None


def _sharded(folder: Path, subfolders: list[str]) -> StoredFiles:
    from partita.checkpoint.format.metadata import add_metadata, read_metadata

    stored = StoredFiles(folder)
    for name in subfolders:
        index = folder / name / METADATA
        try:
            add_metadata(stored, read_metadata(index), name)
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise damaged(index) from error
    return stored
