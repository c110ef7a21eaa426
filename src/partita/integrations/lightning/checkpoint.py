"""A checkpoint of Lightning's is one of the engine's, in a folder of its own: what Lightning keeps beside the model and
the optimizer is in it, as one value of ``engine.extra``.
"""

import io
from pathlib import Path
from typing import Any

import torch

from partita.checkpoint.format.stored import open_stored
from partita.checkpoint.plain import object_bytes
from partita.checkpoint.training_state import EXTRA
from partita.engine.engine import Engine
from partita.errors import PartitaError

_KEY = "lightning"


def save(engine: Engine, folder: Path, beside: Any) -> None:
    """Save the engine, and what is ``beside`` it on rank 0 (anything that can be pickled), as the folder's checkpoint.

    Raises:
        PartitaError: it cannot be written.
    """
    engine.extra[_KEY] = object_bytes(beside)
    try:
        engine.save(folder)
    finally:
        del engine.extra[_KEY]


def load(engine: Engine, folder: Path, *, only_model: bool, strict: bool, weights_only: bool | None) -> Any:
    """Take up the folder's checkpoint; returns what was saved beside the engine.

    Args:
        weights_only: whether that may hold plain values alone; None: torch.load's default.

    Raises:
        PartitaError: there is none, or it was not saved by :func:`save`.
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
