"""Checkpoints by directory, tag and ``latest``, as in DeepSpeed: each tag is a folder with a partita checkpoint."""

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from partita.checkpoint.external.universal import CLIENT_STATE, COUNTERS, find_universal
from partita.checkpoint.format.folder import complete_checkpoints
from partita.checkpoint.format.stored import open_stored
from partita.checkpoint.training_state import EXTRA
from partita.engine.engine import Engine
from partita.errors import PartitaError

LATEST = "latest"


@dataclass(frozen=True)
class CheckpointExtras:
    """Additional contents of a checkpoint: the script's values and DeepSpeed's counters."""

    client_state: dict[str, Any] = field(default_factory=dict)
    global_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0


class TaggedCheckpoints:
    """Checkpoints of one engine, by tag. Every method is a collective."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def save(self, folder: Path, tag: str, kept: CheckpointExtras, *, latest: bool) -> None:
        """Save under a tag; with ``latest``, make this the checkpoint that is loaded without a tag.

        Raises:
            PartitaError: on all ranks: the tags differ, or the checkpoint cannot be written.
        """
        marks = self._engine.each(float(int.from_bytes(hashlib.sha1(tag.encode()).digest()[:6])))
        if len(set(marks)) > 1:
            raise PartitaError(
                f"save_checkpoint: the ranks' tags differ (this rank's is '{tag}'): pass the same tag on every rank"
            )
        counters = asdict(kept)
        self._engine.extra[CLIENT_STATE] = counters.pop("client_state")
        self._engine.extra[COUNTERS] = counters
        self._engine.save(folder / tag)
        self._engine.wait_for_checkpoint()
        if latest:
            self.write(folder / LATEST, lambda path: path.write_text(tag))

    def write(self, path: Path, put: Callable[[Path], Any]) -> None:
        """Write a file atomically on rank 0; every rank waits until it is written.

        Raises:
            PartitaError: on all ranks: the file cannot be written.
        """
        problem = ""
        if self._engine.mesh.rank == 0:
            new = path.with_name(f"{path.name}.new")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                put(new)
                new.replace(path)
            except (OSError, RuntimeError) as error:  # torch.save raises a RuntimeError if the disk is full
                problem = f": {error}"
        if self._engine.any(bool(problem)):
            raise PartitaError(f"rank 0 cannot write '{path}'{problem}; name a folder that is writable and has space")

    def load(
        self, folder: Path, tag: str | None, *, only_model: bool, strict: bool
    ) -> tuple[Path, CheckpointExtras] | None:
        """Load the checkpoint of a tag (None: the latest), and return its path and additional contents.

        Returns None, with a warning, if no tag is given and the folder has no latest checkpoint.

        Raises:
            PartitaError: on all ranks: the checkpoint is missing, damaged, of another model, or was written by
                DeepSpeed.
        """
        found = self._agreed(folder, tag)
        if found is None:
            return None
        restored = self._engine.load(found, only_model=only_model, strict=strict)
        stored = open_stored(restored.path)
        extra: dict[str, Any] = stored.value(EXTRA) if EXTRA in stored.values else {}
        counters = extra.get(COUNTERS) or {"global_steps": restored.step}
        return restored.path, CheckpointExtras(extra.get(CLIENT_STATE, {}), **counters)

    def _agreed(self, folder: Path, tag: str | None) -> Path | None:
        """Return the result of :meth:`_find`; raise an error on all ranks unless all find a checkpoint or none does."""
        found, problem = None, None
        try:
            found = self._find(folder, tag)
        except PartitaError as error:
            problem = error
        there = self._engine.each(float(found is not None))
        if self._engine.any(problem is not None) or len(set(there)) > 1:
            others = [rank for rank, is_there in enumerate(there) if not is_there]
            raise problem or PartitaError(
                f"load_checkpoint: ranks {others} do not find the checkpoint in '{folder}', but other ranks do: use a "
                "folder that all ranks can read"
            )
        return found

    def _find(self, folder: Path, tag: str | None) -> Path | None:
        named = tag
        if named is None and (folder / LATEST).is_file():
            named = (folder / LATEST).read_text().strip()
        path = folder if named is None else folder / named
        if complete_checkpoints(path):
            return path
        if find_universal(path) is not None:
            raise PartitaError(
                f"load_checkpoint: '{path}' is a universal checkpoint of DeepSpeed: convert it with 'partita convert "
                f"checkpoint {path} {path}-partita', and load that folder without a tag"
            )
        if tag is not None:
            raise PartitaError(f"load_checkpoint: there is no checkpoint '{tag}' in '{folder}'")
        warnings.warn(f"load_checkpoint loads nothing: '{folder}' has no file '{LATEST}'; pass a tag", stacklevel=4)
        return None
