"""The Trainer's checkpoints: folders ``checkpoint-N`` that contain an engine's states."""

import json
import re
from pathlib import Path

from accelerate.utils import broadcast_object_list

from partita.checkpoint.format.folder import complete
from partita.errors import PartitaError
from partita.integrations.huggingface.accelerator import CHECKPOINT

_NAME = re.compile(r"checkpoint-(\d+)")
# The file that the Trainer writes last.
_STATE = "trainer_state.json"


def newest_on_rank_0(folder: Path, rank: int) -> Path:
    """Return rank 0's result of :func:`newest_complete` on all ranks, or raise its error on all ranks."""
    found: list[Path | PartitaError | None] = [None]
    if rank == 0:
        try:
            found = [newest_complete(folder)]
        except PartitaError as error:
            found = [error]
    met = broadcast_object_list(found)[0]
    if isinstance(met, PartitaError):
        raise met
    return Path(met)


def newest_complete(folder: Path) -> Path:
    """Return the complete checkpoint with the highest step.

    Raises:
        PartitaError: there is none.
    """
    found = {int(match[1]): path for path in folder.glob("*") if (match := _NAME.fullmatch(path.name))}
    reasons = dict[Path, str]()
    for step in sorted(found, reverse=True):
        reason = what_lacks(found[step])
        if reason is None:
            return found[step]
        reasons[found[step]] = reason
    said = "".join(f"; '{path.name}': {reason}" for path, reason in reasons.items())
    raise PartitaError(
        f"No valid checkpoint found in output directory ({folder}): none is complete (checkpoint-N){said}"
    )


def what_lacks(checkpoint: Path) -> str | None:
    """Return why training cannot resume from a checkpoint; None if it can."""
    try:
        json.loads((checkpoint / _STATE).read_text())
    except FileNotFoundError:
        return f"it has no {_STATE}, which is written last"
    except ValueError:
        return f"its {_STATE} is cut off"
    states = checkpoint / CHECKPOINT
    if states.is_dir():
        return None if complete(states) else f"no complete states in '{CHECKPOINT}'"
    if any(checkpoint.glob("optimizer.pt")):
        return (
            f"it was saved without partita (optimizer.pt); 'partita convert checkpoint {checkpoint}' makes one that "
            "can be resumed"
        )
    return f"no '{CHECKPOINT}' in it: it holds weights alone (save_only_model)"
