"""The choice of the checkpoint that all ranks load."""

import os
from pathlib import Path

from partita.checkpoint.backend import Backend, Stored
from partita.comm.collective_errors import shared_errors
from partita.comm.group import Group
from partita.errors import PartitaError


def open_on_ranks(backend: Backend, folder: Path, all_ranks: Group) -> Stored:
    """Open on every rank the checkpoint that rank 0 finds: a network file system may list other ones on other nodes.

    A collective. The ranks may have different paths to the folder.

    Raises:
        PartitaError: on all ranks: one of them cannot open it.
    """
    with shared_errors(all_ranks):
        found = None if all_ranks.index else backend.open(folder)
    relative = None if found is None else os.path.relpath(found.folder, folder)
    relative = all_ranks.broadcast_object(relative, "engine.load")
    with shared_errors(all_ranks):
        return found if found is not None else _open_same(backend, folder, relative)


def _open_same(backend: Backend, folder: Path, relative: str) -> Stored:
    """Open the checkpoint that rank 0 found at the path ``relative`` to the folder: in it, or next to it."""
    path = folder.parent / Path(relative).name if relative.startswith(os.pardir) else folder / relative
    stored = backend.open(path)
    if stored.folder != path:
        raise PartitaError(
            f"checkpoint: rank 0 loads '{path}', and this rank finds '{stored.folder}' in its place: load again when "
            "all nodes see the same files"
        )
    return stored
