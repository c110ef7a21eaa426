"""A folder of checkpoints. ``step-N`` is a complete checkpoint; one that is being written or removed has a hidden name.

A checkpoint becomes visible by one rename, after all its files are durable. If its step already exists, the earlier
checkpoint is first renamed to a hidden name, and stays valid until the new one is visible. Leftovers of a crash are
hidden, and the next save removes them.

Each save writes into its own hidden folder, named by a ``token``. The lock files of live processes in that folder keep
other runs from removing it. A sequence number in the manifest tells which checkpoint is newest: steps start again in a
new run, and clocks and file times are unreliable.
"""

import contextlib
import errno
import re
import secrets
import shutil
from pathlib import Path

from partita.checkpoint.format.manifest import MANIFEST, METADATA, SEQUENCE
from partita.checkpoint.format.system import explain_os_errors, is_locked, sync_folder
from partita.errors import PartitaError

LOCK_SUFFIX = ".lock"

_STEP = re.compile(r"step-(\d+)")
_REPLACED = re.compile(r"\.step-(\d+)\.[\w-]+\.replaced")
_HIDDEN = re.compile(r"\.step-(\d+)\.([\w-]+\.)?(partial|replaced|removed|old)")
_NUMBER = re.compile(rb'"%b": (\d+)' % SEQUENCE.encode())
_HEAD_BYTES = 4096


def complete_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the complete checkpoints in a folder, by step, in the order in which they were published."""
    return dict(sorted(_found(folder).items(), key=lambda item: (_sequence(item[1]), item[0])))


def _found(folder: Path) -> dict[int, Path]:
    found = dict[int, Path]()
    with explain_os_errors(folder):
        for pattern in (_REPLACED, _STEP):
            for path in folder.iterdir() if folder.is_dir() else ():
                if (match := pattern.fullmatch(path.name)) and (path / MANIFEST).exists():
                    found[int(match[1])] = path
    return found


def _sequence(path: Path) -> int:
    """Return the sequence number of a checkpoint; 0 if its version had none.

    A checkpoint with a damaged manifest has a number too, so that it is not silently skipped.
    """
    try:
        with open(path / MANIFEST, "rb") as file:
            found = _NUMBER.search(file.read(_HEAD_BYTES))
    except FileNotFoundError:  # another run has just removed it
        return 0
    return int(found[1]) if found else 0


def next_sequence(folder: Path) -> int:
    """Return the sequence number for a checkpoint that is published now."""
    return 1 + max(map(_sequence, _found(folder).values()), default=0)


def find_checkpoint(folder: Path) -> Path | None:
    """Return ``folder`` if it is a checkpoint, or else the checkpoint in it that was published last; None if there is
    none.

    A checkpoint that has a hidden name while it is replaced is found by its original name.
    """
    with explain_os_errors(folder):
        if (folder / MANIFEST).exists() or (folder / METADATA).exists():
            return folder
    if (match := _STEP.fullmatch(folder.name)) and (replaced := _found(folder.parent).get(int(match[1]))):
        return replaced
    return next(reversed(complete_checkpoints(folder).values()), None)


def resolve_checkpoint(folder: Path) -> Path:
    """Return the checkpoint of :func:`find_checkpoint`.

    Raises:
        PartitaError: there is none.
    """
    found = find_checkpoint(folder)
    if found is not None:
        return found
    if not folder.exists():
        raise PartitaError(f"checkpoint: '{folder}' does not exist: it has no complete checkpoint (step-N)")
    raise PartitaError(
        f"checkpoint: '{folder}' is not a checkpoint, and has no complete one (step-N): name the folder that a run "
        "saved into"
    )


def partial_of(folder: Path, step: int, token: str) -> Path:
    """Return the hidden folder in which a checkpoint is written. No other save has the same ``token``."""
    return folder / f".step-{step}.{token}.partial"


def start_partial(partial: Path) -> None:
    """Create a hidden folder to write into. Leftovers of earlier crashes next to it are removed."""
    folder = partial.parent
    with explain_os_errors(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise PartitaError(f"checkpoint: '{folder}' is a file, or a link to nothing: name a folder") from None
        _clear(folder)
        partial.mkdir()


def folder_warning(folder: Path, step: int) -> str | None:
    """Return a warning if the folder holds later steps or another run writes into it; None otherwise."""
    with explain_os_errors(folder):
        if not folder.is_dir():
            return None
    last = max(_found(folder), default=step)
    if last > step:
        return (
            f"checkpoint: '{folder}' holds later steps (to step-{last}) than step-{step}, which is saved now: "
            "engine.load() loads the checkpoint saved last, and checkpoint.keep removes those saved first; give each "
            "run its own folder to keep both"
        )
    busy = [path for path in folder.iterdir() if _HIDDEN.fullmatch(path.name) and _is_busy(path)]
    if busy:
        return (
            f"checkpoint: '{busy[0]}' is being written by another run (or was left by one that crashed, where the "
            "filesystem has no locks): give each run its own folder"
        )
    return None


def _is_busy(partial: Path) -> bool:
    """Return True if a live process writes into a hidden folder."""
    return any(map(is_locked, partial.glob(f"*{LOCK_SUFFIX}")))


def _clear(folder: Path) -> None:
    """Remove leftovers of crashes, and restore a checkpoint that was renamed but not replaced."""
    for path in folder.iterdir():
        if (match := _HIDDEN.fullmatch(path.name)) is None or _is_busy(path):
            continue
        if match[3] == "replaced" and not (folder / f"step-{match[1]}" / MANIFEST).exists():
            with contextlib.suppress(OSError):  # the run that renamed it has finished after all
                path.rename(folder / f"step-{match[1]}")
        else:
            discard(path)


def discard(path: Path) -> None:
    """Remove a checkpoint or a hidden folder. It is renamed first, so that it never looks complete."""
    shutil.rmtree(_hide(path, "removed"), ignore_errors=True)


def _hide(path: Path, kind: str) -> Path:
    """Rename a folder, if it still exists, to a unique hidden name; return the new path."""
    step = path.name.lstrip(".").partition(".")[0]
    hidden = path.with_name(f".{step}.{secrets.token_hex(4)}.{kind}")
    with contextlib.suppress(FileNotFoundError):
        path.rename(hidden)
    return hidden


def publish(partial: Path, step: int, keep: int) -> Path:
    """Make a checkpoint visible whose files are all durable; return its folder.

    All other checkpoints except the ``keep - 1`` published last are removed.
    """
    folder, final = partial.parent, partial.parent / f"step-{step}"
    with explain_os_errors(final):
        sync_folder(partial)
        while not _renamed(partial, final):
            _hide(final, "replaced")
        sync_folder(folder)
        for lock in final.glob(f"*{LOCK_SUFFIX}"):
            lock.unlink()
        for replaced in folder.glob(f".step-{step}.*.replaced"):
            discard(replaced)
        others = [path for other, path in complete_checkpoints(folder).items() if other != step]
        for path in others[: max(0, len(others) - keep + 1)]:
            discard(path)
    return final


def _renamed(path: Path, final: Path) -> bool:
    """Rename a folder; return False if another folder, which is not empty, already has the name."""
    try:
        path.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True
