"""A whole checkpoint of another library, and partita's that is made of it."""

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from partita.checkpoint.backend import Request, Stored, Value, saved_boxes
from partita.checkpoint.foreign.torch_files import IMPLEMENTATION
from partita.checkpoint.format.backend import Alone, FileBackend
from partita.checkpoint.names import GROUPS, MODEL, STATE
from partita.checkpoint.plain import plain
from partita.checkpoint.training_state import ENGINE
from partita.checkpoint.versions import versions
from partita.config.schema import Precision
from partita.errors import PartitaError
from partita.plan.flat_range import FlatRange

# The optimizer's counter of a parameter's updates.
STEP = ".step"
_KEEP_ALL = 2**31


@dataclass
class Foreign:
    """Another library's checkpoint after ``step`` updates.

    ``stored`` has weights and optimizer states under partita's keys, ``values`` what else there is, also under
    partita's; ``aliases`` are the other names of tied parameters, by key. ``notices`` say what of it is not taken.
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
        counters = {"steps": self.step, "loss_scale": Precision().initial_loss_scale, "good_steps": 0}
        self.values[ENGINE] = counters | self.values.get(ENGINE, {})

    def tensors(self) -> list[str]:
        """The keys of the weights and optimizer states."""
        return [key for key in self.stored.tensors if key.startswith((MODEL, STATE))]


def write(foreign: Foreign, folder: Path) -> Path:
    """Write ``folder/step-N``, a checkpoint of partita; no more than one tensor is in memory at a time.

    Raises:
        PartitaError: it holds no weights, or something that could not be loaded again; it cannot be read or written.
    """
    keys = foreign.tensors()
    if not any(key.startswith(MODEL) for key in keys):
        raise PartitaError(f"checkpoint: '{foreign.stored.folder}' holds no weights")
    about = {
        "versions": versions(),
        "ranks": 1,
        "config": {},
        "converted": {"library": foreign.library, "from": str(foreign.stored.folder)},
    }
    request = Request(folder.absolute(), foreign.step, _KEEP_ALL, False, about, foreign.aliases)
    draft = FileBackend(Alone()).draft(request, secrets.token_hex(4))
    boxes = [value for key in keys for value, _ in _boxes(foreign.stored, key)]
    others = [Value(key, value=plain(value, f"'{key}'")) for key, value in sorted(foreign.values.items())]
    try:
        draft.begin(boxes, others)
        draft.join()
        draft.write(_batches(foreign.stored, keys))
        draft.commit()
    except BaseException:
        draft.leave()
        draft.discard()
        raise
    draft.leave()
    return request.folder / f"step-{request.step}"


def _boxes(stored: Stored, key: str) -> Iterator[tuple[Value, slice]]:
    """What is saved of a tensor, each with its place in it."""
    tensor = stored.tensors[key]
    for box, place in saved_boxes(FlatRange.row_major(tensor.shape), tensor.dtype):
        yield Value(key, tensor.shape, tensor.dtype, box), place


def _batches(stored: Stored, keys: list[str]) -> Iterator[list[Tensor]]:
    """The values of the boxes, flat, a tensor at a time."""
    for key in keys:
        flat = stored.value(key).contiguous().view(-1)
        yield [flat[place] for _, place in _boxes(stored, key)]


def schedule_of(step: int, rates: list[float]) -> dict[str, Any]:
    """The state of a torch scheduler that was stepped after each of ``step`` updates; ``rates``: in the next one."""
    return {"last_epoch": step, "_step_count": step + 1, "_last_lr": rates}


def latest_step(stored: Stored) -> int:
    """The most updates that any parameter's optimizer state counts; 0 where none does."""
    keys = [key for key in stored.keys if key.startswith(STATE) and key.endswith(STEP)]
    return int(max((float(stored.value(key)) for key in keys), default=0))
