"""A folder of checkpoints: ``step-N`` is one that is complete; what is being written, or removed, has a hidden name.

A checkpoint becomes visible by one rename, after every file of it lasts. So whatever a crash leaves behind is hidden,
and is removed by the next save.
"""

import re
import shutil
from pathlib import Path

from partita.checkpoint.stored import MANIFEST, METADATA
from partita.checkpoint.system import explained, sync_folder
from partita.errors import PartitaError

_STEP = re.compile(r"step-(\d+)")
_HIDDEN = re.compile(r"\.step-\d+\.(partial|old)")


def complete(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder, by step, in order."""
    if not folder.is_dir():
        return {}
    found = {int(match[1]): path for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))}
    return {step: found[step] for step in sorted(found) if (found[step] / MANIFEST).exists()}


def chosen(folder: Path) -> Path:
    """The checkpoint that ``folder`` is, or the newest one in it.

    Raises:
        PartitaError: there is none.
    """
    if (folder / MANIFEST).exists() or (folder / METADATA).exists():
        return folder
    found = list(complete(folder).values())
    if not found:
        raise PartitaError(f"checkpoint: '{folder}' is none, and holds no complete one (step-N)")
    return found[-1]


def start_partial(folder: Path, step: int) -> Path:
    """A new hidden folder to write into; what earlier crashes left is removed."""
    partial = folder / f".step-{step}.partial"
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        clean(folder)
        partial.mkdir()
    return partial


def clean(folder: Path) -> None:
    """Remove what crashes have left."""
    for path in folder.iterdir():
        if _HIDDEN.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def publish(partial: Path, step: int, keep: int) -> Path:
    """Make a checkpoint visible whose files all last, and remove all but the newest ``keep``."""
    folder, final = partial.parent, partial.parent / f"step-{step}"
    with explained(final):
        sync_folder(partial)
        if final.exists():
            final.rename(folder / f".step-{step}.old")
        partial.rename(final)
        sync_folder(folder)
        for old_step in list(complete(folder))[:-keep]:
            hidden = folder / f".step-{old_step}.old"
            shutil.rmtree(hidden, ignore_errors=True)
            (folder / f"step-{old_step}").rename(hidden)
        clean(folder)
    return final
