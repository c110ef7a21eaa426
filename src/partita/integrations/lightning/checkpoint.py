"""Lightning's checkpoints: each is a checkpoint of the engine, in a folder of its own.

Lightning's state besides the model and the optimizer is one value of ``engine.extra`` in it.
"""

import io
from pathlib import Path
from typing import Any

import torch

from partita.checkpoint.format.stored import open_stored
from partita.checkpoint.serializable import object_bytes
from partita.checkpoint.training_state import EXTRA
from partita.engine.engine import Engine
from partita.errors import PartitaError

_KEY = "lightning"


def save(engine: Engine, folder: Path, beside: Any) -> None:
    """Save the engine as the folder's checkpoint, with ``beside``: rank 0's additional state (anything picklable).

    Raises:
        PartitaError: the checkpoint cannot be written.
    """
    engine.extra[_KEY] = object_bytes(beside)
    try:
        engine.save(folder)
    finally:
        del engine.extra[_KEY]


def load(engine: Engine, folder: Path, *, only_model: bool, strict: bool, weights_only: bool | None) -> Any:
    """Load the folder's checkpoint into the engine; return the additional state that :func:`save` stored.

    Args:
        weights_only: whether this state may contain plain values only; None: torch.load's default.

    Raises:
        PartitaError: there is no checkpoint, or it was not saved by :func:`save`.
    """
    restored = engine.load(folder, only_model=only_model, strict=strict)
    engine.extra.pop(_KEY, None)
    stored = open_stored(restored.path)
    extra = stored.value(EXTRA) if EXTRA in stored.values else {}
    if _KEY not in extra:
        raise PartitaError(
            f"checkpoint: '{restored.path}' was saved without Lightning, whose progress is not in it; take it up "
            "with engine.load in a loop of your own, or name a folder that Lightning saved"
        )
    return torch.load(io.BytesIO(extra[_KEY]), map_location="cpu", weights_only=weights_only)
