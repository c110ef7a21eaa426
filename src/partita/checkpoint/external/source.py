"""A complete checkpoint of another library, and its conversion to partita's format."""

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from partita.checkpoint.backend import Request, Stored, Value, saved_boxes
from partita.checkpoint.external.torch_files import IMPLEMENTATION
from partita.checkpoint.format.backend import FileBackend, SingleProcess
from partita.checkpoint.names import GROUPS, MODEL, STATE
from partita.checkpoint.serializable import to_serializable
from partita.checkpoint.training_state import ENGINE
from partita.checkpoint.versions import versions
from partita.errors import PartitaError
from partita.table.flat_range import FlatRange

# Suffix of the key of the optimizer's update count of a parameter.
STEP = ".step"
_KEEP_ALL = 2**31


@dataclass
class ExternalCheckpoint:
    """Another library's checkpoint after ``step`` updates.

    ``stored``: weights and optimizer states, under partita's keys. ``values``: all other values, also under partita's
    keys. ``aliases``: further names of tied parameters, by key. ``notices``: messages about content that is not
    converted.
    """

    library: str
    stored: Stored
    step: int
    values: dict[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, list[str]] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for key in self.stored.values:
            if key.startswith((MODEL, STATE, GROUPS)) and key.rpartition(".")[2] not in IMPLEMENTATION:
                self.values.setdefault(key, self.stored.value(key))
        self.values[ENGINE] = {"steps": self.step} | self.values.get(ENGINE, {})

    def tensors(self) -> list[str]:
        """Return the keys of the weights and optimizer states."""
        return [key for key in self.stored.tensors if key.startswith((MODEL, STATE))]


def write(external: ExternalCheckpoint, folder: Path) -> Path:
    """Write a partita checkpoint to ``folder/step-N``, with at most one tensor in memory at a time.

    Raises:
        PartitaError: the checkpoint holds no weights, holds a value that could not be loaded again, or cannot be read
            or written.
    """
    keys = external.tensors()
    if not any(key.startswith(MODEL) for key in keys):
        raise PartitaError(f"checkpoint: '{external.stored.folder}' holds no weights")
    about = {
        "versions": versions(),
        "ranks": 1,
        "config": {},
        "converted": {"library": external.library, "from": str(external.stored.folder)},
    }
    request = Request(folder.absolute(), external.step, _KEEP_ALL, False, about, external.aliases)
    draft = FileBackend(SingleProcess()).draft(request, secrets.token_hex(4))
    boxes = [value for key in keys for value, _ in _boxes(external.stored, key)]
    others = [Value(key, value=to_serializable(value, f"'{key}'")) for key, value in sorted(external.values.items())]
    try:
        draft.begin(boxes, others)
        draft.join()
        draft.write(_batches(external.stored, keys))
        draft.commit()
    except BaseException:
        draft.leave()
        draft.discard()
        raise
    draft.leave()
    return request.folder / f"step-{request.step}"


def _boxes(stored: Stored, key: str) -> Iterator[tuple[Value, slice]]:
    """Yield the boxes in which a tensor is saved, each with its slice of the flat tensor."""
    tensor = stored.tensors[key]
    for box, place in saved_boxes(FlatRange.row_major(tensor.shape), tensor.dtype):
        yield Value(key, tensor.shape, tensor.dtype, box), place


def _batches(stored: Stored, keys: list[str]) -> Iterator[list[Tensor]]:
    """Yield the flat values of the boxes, one tensor at a time."""
    for key in keys:
        flat = stored.value(key).contiguous().view(-1)
        yield [flat[place] for _, place in _boxes(stored, key)]


def schedule_of(step: int, rates: list[float]) -> dict[str, Any]:
    """Return the state of a PyTorch scheduler that was stepped after each of ``step`` updates.

    ``rates``: the learning rates of the next update.
    """
    return {"last_epoch": step, "_step_count": step + 1, "_last_lr": rates}


def latest_step(stored: Stored) -> int:
    """Return the largest update count in any parameter's optimizer state; 0 if there is none."""
    keys = [key for key in stored.keys if key.startswith(STATE) and key.endswith(STEP)]
    return int(max((float(stored.value(key)) for key in keys), default=0))
