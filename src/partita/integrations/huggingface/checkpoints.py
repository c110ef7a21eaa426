"""The Trainer's checkpoints: folders ``checkpoint-N`` that contain an engine's states."""

import json
import re
from pathlib import Path

from accelerate.utils import broadcast_object_list

from partita.checkpoint.format.folder import complete_checkpoints
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
    result = broadcast_object_list(found)[0]
    if isinstance(result, PartitaError):
        raise result
    return Path(result)


def newest_complete(folder: Path) -> Path:
    """Return the complete checkpoint with the highest step.

    Raises:
        PartitaError: there is none.
    """
    found = {int(match[1]): path for path in folder.glob("*") if (match := _NAME.fullmatch(path.name))}
    reasons = dict[Path, str]()
    for step in sorted(found, reverse=True):
        reason = why_incomplete(found[step])
        if reason is None:
            return found[step]
        reasons[found[step]] = reason
    listed = "".join(f"; '{path.name}': {reason}" for path, reason in reasons.items())
    raise PartitaError(
        f"No valid checkpoint found in output directory ({folder}): none is complete (checkpoint-N){listed}"
    )


def why_incomplete(checkpoint: Path) -> str | None:
    """Return the reason why training cannot resume from a checkpoint; None if it can."""
    try:
        json.loads((checkpoint / _STATE).read_text())
    except FileNotFoundError:
        return f"it has no {_STATE}, which is written last"
    except ValueError:
        return f"its {_STATE} is truncated"
    states = checkpoint / CHECKPOINT
    if states.is_dir():
        return None if complete_checkpoints(states) else f"no complete states in '{CHECKPOINT}'"
    if any(checkpoint.glob("optimizer.pt")):
        return (
            f"it was saved without partita (optimizer.pt); convert it with 'partita convert checkpoint {checkpoint}' "
            "to resume from it"
        )
    return f"no '{CHECKPOINT}' in it: it contains only weights (save_only_model)"
