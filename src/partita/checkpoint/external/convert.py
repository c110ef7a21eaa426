"""Detection of another library's checkpoint layout, for conversion to partita's format."""

from collections.abc import Callable
from pathlib import Path

from partita.checkpoint.external.companion_files import with_training_state
from partita.checkpoint.external.fsdp import open_fsdp
from partita.checkpoint.external.source import ExternalCheckpoint
from partita.checkpoint.external.trainer import Model, find_optimizer, open_trainer
from partita.checkpoint.external.universal import find_universal, open_universal
from partita.checkpoint.format.folder import complete_checkpoints
from partita.checkpoint.format.manifest import METADATA
from partita.errors import PartitaError


def open_external(folder: Path, read_model: Callable[[Path], Model]) -> ExternalCheckpoint:
    """Open the checkpoint of another library in ``folder``.

    Args:
        read_model: function that reads the model in a Trainer's folder, because the optimizer there only numbers its
            parameters.

    Raises:
        PartitaError: the checkpoint is partita's own, has an unknown layout, or is damaged.
    """
    if (universal := find_universal(folder)) is not None:
        return open_universal(universal)
    if (stored := open_fsdp(folder)) is not None:
        return with_training_state("FSDP", stored, folder)
    if (optimizer := find_optimizer(folder)) is not None:
        return open_trainer(folder, optimizer, read_model)
    if (folder / METADATA).exists() or complete_checkpoints(folder):
        raise PartitaError(
            f"convert: '{folder}' is a checkpoint of partita or torch.distributed.checkpoint, which engine.load reads "
            "without conversion"
        )
    raise PartitaError(
        f"convert: '{folder}' is not a known checkpoint: expected DeepSpeed's universal format (zero/), FSDP's "
        "(pytorch_model_fsdp_0/ or pytorch_model_fsdp.bin), or the Trainer's ('optimizer.pt' next to the weights)"
    )
