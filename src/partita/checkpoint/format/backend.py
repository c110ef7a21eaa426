"""Checkpoints as folders of files, which torch.distributed.checkpoint can also read.

Every rank writes one data file, and next to it a table of its contents. The table also signals that the rank is done,
so nothing is communicated in the background. The first rank makes the checkpoint visible when all files are durable.
"""

import contextlib
import itertools
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from partita.checkpoint.backend import Backend, Draft, Request, Stored, Value
from partita.checkpoint.external.opening import open_any
from partita.checkpoint.format.file import Snapshots, stream_file, write_snapshot
from partita.checkpoint.format.folder import (
    LOCK_SUFFIX,
    discard,
    folder_warning,
    next_sequence,
    partial_of,
    publish,
    start_partial,
)
from partita.checkpoint.format.manifest import (
    FORMAT,
    MANIFEST,
    METADATA,
    SEQUENCE,
    add_aliases,
    add_table,
    has_own_metadata,
    table_of,
    with_checksum,
)
from partita.checkpoint.format.record import BoxLayout, FileLayout
from partita.checkpoint.format.stored import StoredFiles
from partita.checkpoint.format.system import (
    Lock,
    checksum,
    damaged,
    explain_os_errors,
    is_locked,
    read_small,
    write_small,
)
from partita.errors import PartitaError
from partita.memory.accelerator import HOST
from partita.memory.collector import collector_paused

POLL_S = 0.02
FAILED_SUFFIX = ".failed"


class Writers(Protocol):
    """The processes that write a checkpoint together: the ranks of a mesh, or a single process."""

    @property
    def rank(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def timeout_s(self) -> float: ...


@dataclass(frozen=True)
class SingleProcess:
    """A single process that writes values from the host."""

    rank: int = 0
    num_ranks: int = 1
    device: torch.device = HOST
    timeout_s: float = 0.0


class FileBackend(Backend):
    """The store of checkpoints that a group of processes writes, one checkpoint at a time."""

    def __init__(self, writers: Writers) -> None:
        self.writers = writers
        self.snapshots = Snapshots(writers.device)
        self._boxes = BoxLayout([])
        self.warned = False  # True once a warning about the folder was given

    def draft(self, request: Request, token: str) -> "FileDraft":
        return FileDraft(self, request, token)

    def open(self, folder: Path) -> Stored:
        stored = open_any(folder)
        if self.writers.rank == 0 and not has_own_metadata(stored):
            raise damaged(stored.folder / METADATA)
        return stored

    def box_layout(self, boxes: Sequence[Value]) -> BoxLayout:
        """Return the layout of ``boxes``. The same object is returned as long as the boxes are the same."""
        if self._boxes.values != boxes:
            self._boxes = BoxLayout(boxes)
        return self._boxes


class FileDraft(Draft):
    """A checkpoint in progress: a hidden folder with a lock file for each rank that writes."""

    def __init__(self, backend: FileBackend, request: Request, token: str) -> None:
        self._backend = backend
        self._request = request
        self._rank = backend.writers.rank
        self._num_ranks = backend.writers.num_ranks
        self._partial = partial_of(request.folder, request.step, token)
        self._layout: FileLayout
        self._memory: Tensor
        self._lock: Lock | None = None
        self._seen = set[int]()  # ranks that were seen to write

    def begin(self, boxes: Sequence[Value], others: Sequence[Value]) -> None:
        self._layout = FileLayout(self._backend.box_layout(boxes), others)
        if self._rank == 0:
            warning = folder_warning(self._request.folder, self._request.step) if not self._backend.warned else None
            if warning is not None:
                self._backend.warned = True
                warnings.warn(warning, stacklevel=6)
            start_partial(self._partial)

    def join(self) -> None:
        path = self._partial / _lock_name(self._rank)
        with explain_os_errors(path):
            try:
                self._lock = Lock(path)
            except FileNotFoundError as error:
                if not self._rank:
                    raise
                raise PartitaError(
                    f"checkpoint: rank {self._rank} does not see the folder '{self._partial}', which rank 0 has made: "
                    "checkpoint.dir, or the folder of engine.save, must be one that all nodes share"
                ) from error

    @property
    def snapshot_bytes(self) -> int:
        return max(0, self._layout.num_bytes - self._backend.snapshots.num_bytes)

    def snapshot(self, batches: Iterable[list[Tensor]]) -> None:
        if self._rank == 0:  # before any rank continues, and may die
            self._seen = {rank for rank in range(self._num_ranks) if is_locked(self._partial / _lock_name(rank))}
        self._memory = self._backend.snapshots.take(self._layout, batches)

    def write(self, batches: Iterable[list[Tensor]] | None = None) -> None:
        name = _file_name(self._rank)
        if batches is None:
            sums = write_snapshot(self._partial / name, self._layout, self._memory)
        else:
            tensors = itertools.chain.from_iterable(batches)
            sums = stream_file(self._partial / name, self._layout, tensors, self._backend.writers.device)
        table = table_of(name, self._layout.records, sums, self._layout.num_bytes)
        write_small(self._partial / _table_name(self._rank), table)

    def commit(self) -> None:
        self._await_tables()
        self._publish()

    @collector_paused()
    def _publish(self) -> None:
        """Write index and manifest, and make the checkpoint visible."""
        from partita.checkpoint.format.metadata import metadata_of

        stored, tables, files = StoredFiles(self._partial), dict[str, str](), dict[str, int]()
        for rank in range(self._num_ranks):
            table = read_small(self._partial / _table_name(rank))
            tables[_table_name(rank)] = checksum(table)
            files[_file_name(rank)] = add_table(stored, table)
        add_aliases(stored, self._request.aliases)
        index = metadata_of(stored)
        write_small(self._partial / METADATA, index)
        manifest = {
            "format": FORMAT,
            SEQUENCE: next_sequence(self._request.folder),
            "step": self._request.step,
            **self._request.about,
            "tables": tables,
            "files": files,
            "metadata": checksum(index),
            "aliases": self._request.aliases,
        }
        write_small(self._partial / MANIFEST, with_checksum(manifest))
        publish(self._partial, self._request.step, self._request.keep)

    def _await_tables(self) -> None:
        """Wait for the tables of all ranks. Each rank writes its table after its data file."""
        partial, timeout_s = self._partial, self._backend.writers.timeout_s
        end = time.monotonic() + timeout_s
        missing = set(range(self._num_ranks))
        while missing:
            ended = {rank for rank in missing & self._seen if not is_locked(partial / _lock_name(rank))}
            with explain_os_errors(partial):  # after the locks: a rank writes its table before it releases its lock
                files = {path.name: path for path in partial.iterdir()}
            for failed in (path for path in files.values() if path.suffix == FAILED_SUFFIX):
                raise PartitaError(f"rank {failed.stem.strip('_')} could not write: {read_small(failed).decode()}")
            missing = {rank for rank in missing if _table_name(rank) not in files}
            if ended & missing:
                raise PartitaError(
                    f"checkpoint: rank {min(ended & missing)} ended before its file in '{partial}' was written: "
                    "look at its output first"
                )
            if missing and time.monotonic() > end:
                raise PartitaError(
                    f"checkpoint: rank {min(missing)} has not written its file in '{partial}' within {timeout_s:g} s "
                    "(communication.timeout_s): look at its output; all ranks need the folder"
                )
            time.sleep(POLL_S if missing else 0)

    def leave(self, error: Exception | None = None) -> None:
        if error is not None and self._rank:
            with contextlib.suppress(PartitaError):  # otherwise the released lock shows the failure
                write_small(self._partial / f"__{self._rank}{FAILED_SUFFIX}", str(error).encode())
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # the next save removes the rest
            discard(self._partial)


def _file_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _table_name(rank: int) -> str:
    return f"__{rank}_0.json"


def _lock_name(rank: int) -> str:
    return f"__{rank}{LOCK_SUFFIX}"
