"""Lightning's checkpoints: each is a folder with a checkpoint of the engine.

Lightning's state other than the model and the optimizer is one value of ``engine.extra`` in it.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from partita.checkpoint.format.stored import open_stored
from partita.checkpoint.serializable import object_bytes
from partita.checkpoint.settings import Change
from partita.checkpoint.training_state import EXTRA
from partita.engine.engine import Engine
from partita.errors import PartitaError

_KEY = "lightning"


def save(engine: Engine, folder: Path, state: Any) -> None:
    """Save the engine as the folder's checkpoint, with rank 0's additional ``state`` (anything picklable).

    The checkpoint is complete on return: Lightning then removes the previous one.

    Raises:
        PartitaError: the checkpoint cannot be written.
    """
    engine.extra[_KEY] = object_bytes(state)
    try:
        engine.save(folder)
    finally:
        del engine.extra[_KEY]
    engine.wait_for_checkpoint()


def load(
    engine: Engine, folder: Path, *, only_model: bool, strict: bool, weights_only: bool | None
) -> tuple[Any, Sequence[Change]]:
    """Load the folder's checkpoint into the engine.

    Return the additional state that :func:`save` stored, and the optimizer's settings that are configured differently
    now. The schedulers in the additional state still have the saved learning rates.

    Args:
        weights_only: as in ``torch.load``, for the additional state; None: the default.

    Raises:
        PartitaError: there is no checkpoint, or it was not saved by :func:`save`.
    """
    restored = engine.load(folder, only_model=only_model, strict=strict)
    engine.extra.pop(_KEY, None)
    stored = open_stored(restored.path)
    extra = stored.value(EXTRA) if EXTRA in stored.values else {}
    if _KEY not in extra:
        raise PartitaError(
            f"checkpoint: '{restored.path}' was saved without Lightning, and does not contain Lightning's progress: "
            "name a folder that Lightning saved, or load it with engine.load in your own loop"
        )
    state = torch.load(io.BytesIO(extra[_KEY]), map_location="cpu", weights_only=weights_only)
    return state, restored.changes
