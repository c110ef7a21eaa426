"""The training state that accelerate and the Trainer save next to weights and optimizer states: step, scheduler, loss
scale and random states.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from partita.checkpoint.backend import Stored
from partita.checkpoint.external.source import ExternalCheckpoint, latest_step
from partita.checkpoint.external.torch_files import load_mapped
from partita.checkpoint.format.system import explain_os_errors
from partita.checkpoint.training_state import ENGINE, RANDOM, SCHEDULER
from partita.errors import PartitaError

TRAINER_STATE = "trainer_state.json"
SCHEDULERS, SCALERS = ("scheduler.pt", "scheduler.bin"), ("scaler.pt",)
# The Trainer's random states, of a single process or of a rank.
_RANDOM = re.compile(r"rng_state(?:_(\d+))?\.pth")
# The functions and classes in the pickled state of numpy's generator, under the names of all numpy versions.
_RECONSTRUCT = numpy.zeros(0).__reduce__()[0]
_ADMITTED: list[Any] = [
    *((_RECONSTRUCT, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *(numpy.ndarray, numpy.dtype, type(numpy.dtype(numpy.uint32))),
]


def with_training_state(library: str, stored: Stored, folder: Path) -> ExternalCheckpoint:
    """Return a checkpoint of the weights and optimizer states in ``stored`` and the training state in ``folder``.

    Raises:
        PartitaError: a file is damaged.
    """
    values = dict[str, Any]()
    notices = list[str]()
    if (file := _first(folder, SCHEDULERS)) is not None:
        values[SCHEDULER] = load_mapped(file)
    if (file := _first(folder, SCALERS)) is not None:
        scaler = load_mapped(file)
        good_steps = int(scaler["_growth_tracker"])
        values[ENGINE] = {"dynamic_loss_scale": float(scaler["scale"]), "good_steps": good_steps}
    values |= {f"{RANDOM}{rank}": state for rank, state in _random_states(folder)}
    if others := sorted(path.name for path in folder.glob("random_states_*.pkl")):
        notices.append(f"{others[0]} is not converted: random numbers continue from the new run's random state")
    return ExternalCheckpoint(library, stored, _step(folder, stored), values, notices=notices)


def _first(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _step(folder: Path, stored: Stored) -> int:
    """Return the number of updates done: the Trainer's ``global_step``, or else the optimizer's count."""
    path = folder / TRAINER_STATE
    if not path.is_file():
        return latest_step(stored)
    try:
        with explain_os_errors(path):
            return int(json.loads(path.read_text())["global_step"])
    except (ValueError, LookupError, TypeError) as error:
        raise PartitaError(f"checkpoint: '{path}' is damaged: it has no global_step ({error})") from error


def _random_states(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for path in sorted(folder.iterdir()):
        if match := _RANDOM.fullmatch(path.name):
            with torch.serialization.safe_globals(_ADMITTED):
                found = load_mapped(path)
            name, keys, place, has_gauss, gauss = found["numpy"]
            state = {
                "torch": found["cpu"],
                "python": found["python"],
                "numpy": (name, torch.from_numpy(keys.astype(numpy.int64)), place, has_gauss, gauss),
            }
            devices = {kind: value for kind, value in found.items() if kind != "cpu" and isinstance(value, Tensor)}
            yield int(match[1] or 0), state | devices
