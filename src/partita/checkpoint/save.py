"""Saving: every rank writes one file, the first makes the checkpoint visible when all of them last.

Training waits for a copy into host memory, and the files are written from that while it goes on. Ranks tell each other
that they are done by the tables beside their files, so nothing is communicated in the background. Where states rest on
disk, or the host has no room for the copies, files are streamed, and training waits for them.
"""

import contextlib
import itertools
import logging
import secrets
import socket
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.checkpoint.beside import Beside
from partita.checkpoint.content import Content
from partita.checkpoint.file import Snapshots, checksum, stream_file, write_snapshot
from partita.checkpoint.folder import (
    LOCK_SUFFIX,
    SEQUENCE,
    discard,
    next_sequence,
    notice,
    partial_of,
    publish,
    start_partial,
)
from partita.checkpoint.layout import FileLayout, Placing
from partita.checkpoint.lock import Lock, is_locked
from partita.checkpoint.stored import (
    FORMAT,
    MANIFEST,
    METADATA,
    Stored,
    add_aliases,
    add_table,
    manifest_bytes,
    metadata_of,
    table_of,
)
from partita.checkpoint.system import explained, read_small, write_small
from partita.comm.together import together
from partita.errors import PartitaError
from partita.memory.capacity import HOST_SHARE, host_memory
from partita.memory.collector import collector_paused
from partita.plan.residence import Tier

_log = logging.getLogger("partita")
POLL_S = 0.02
FAILED_SUFFIX = ".failed"


@dataclass(frozen=True)
class Order:
    """One checkpoint that is to be made, in a ``folder`` with an absolute path; ``about`` goes into its manifest."""

    folder: Path
    step: int
    keep: int
    background: bool
    about: Mapping[str, Any]


class Saver:
    """Makes checkpoints of one engine, one at a time. Its methods but the thread's are collectives."""

    def __init__(self, content: Content, beside: Beside) -> None:
        self._content, self._beside = content, beside
        self._all_ranks = content.runtime.collectives.all_ranks
        mesh = content.runtime.collectives.mesh
        self._rank, self._num_ranks, self._device = mesh.rank, mesh.num_ranks, mesh.device
        self._timeout_s = mesh.timeout_s
        self._snapshots = Snapshots(mesh.device)
        self._placing: Placing | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._run, self._num_saves, self._noticed = "", 0, False
        # Of the checkpoint that is made now: its hidden folder, this rank's lock there, whose locks were seen.
        self._partial: Path | None = None
        self._lock: Lock | None = None
        self._seen = set[int]()

    def save(self, order: Order) -> Path:
        """Returns the folder that the checkpoint is, or will be when :meth:`wait` returns.

        Raises:
            PartitaError: on all ranks, where one of them cannot write.
        """
        self.wait()
        if not self._run:
            self._run = str(self._all_ranks.exchange_objects(secrets.token_hex(4), "engine.save")[0])
        self._num_saves += 1
        self._partial = partial_of(order.folder, order.step, f"{self._run}-{self._num_saves}")
        try:
            self._save(order, self._partial)
        except BaseException:
            self._give_up()
            raise
        return order.folder / f"step-{order.step}"

    def _save(self, order: Order, partial: Path) -> None:
        with together(self._all_ranks):
            stocks = self._content.stocks()
            boxes = [box for stock in stocks for box in stock.boxes] + self._beside.boxes()
            others = [value for stock in stocks for value in stock.others]
            if self._placing is None or self._placing.values != boxes:
                self._placing = Placing(boxes)
            layout = FileLayout(self._placing, others + self._beside.values())
            if self._rank == 0:
                self._notice(order)
                start_partial(partial)
        with together(self._all_ranks):
            self._lock = Lock(partial / _lock_name(self._rank))
        batches = itertools.chain(self._content.batches(stocks), self._beside.batches())
        if order.background and not self._on_disk and self._have_room(layout.num_bytes):
            with together(self._all_ranks):
                if self._rank == 0:  # before any rank goes on, and may die
                    self._seen = {rank for rank in range(self._num_ranks) if is_locked(partial / _lock_name(rank))}
                memory = self._snapshots.take(layout, batches)
            self._start(lambda: self._write(order, partial, layout, lambda path: write_snapshot(path, layout, memory)))
        else:
            tensors = itertools.chain.from_iterable(batches)
            with together(self._all_ranks):
                self._write_own(partial, layout, lambda path: stream_file(path, layout, tensors, self._device))
            with together(self._all_ranks):
                if self._rank == 0:
                    self._publish(order, partial)
            self._unlock()

    def _notice(self, order: Order) -> None:
        """Warn, once, of what else is in the folder."""
        said = notice(order.folder, order.step) if not self._noticed else None
        if said is not None:
            self._noticed = True
            warnings.warn(said, stacklevel=6)

    def wait(self) -> None:
        """Wait until what is written in the background is visible.

        Raises:
            PartitaError: on all ranks, where one of them could not write.
        """
        if self._thread is not None or self._error is not None:
            try:
                with together(self._all_ranks):
                    self._join()
            except Exception:
                self._give_up()
                raise

    def _give_up(self) -> None:
        """Let go of a checkpoint that was not made, and of its space on the disk. No rank writes any more."""
        self._unlock()
        if self._rank == 0 and self._partial is not None:
            with contextlib.suppress(OSError):  # what went wrong is told; the next save clears what is left
                discard(self._partial)

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def _join(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    @property
    def _on_disk(self) -> bool:
        rows = [segment.plan for _, segment in self._content.segments]
        return any(Tier.DISK in (row.param_rest.tier, row.master.tier, row.moments.tier) for row in rows)

    def _have_room(self, num_bytes: int) -> bool:
        """Whether every node has room for the copies of its ranks; the same on all ranks."""
        lacking = max(0, num_bytes - self._snapshots.num_bytes)
        found = self._all_ranks.exchange_objects((socket.gethostname(), lacking, host_memory()[1]), "engine.save")
        needed, free = Counter[str](), dict[str, int]()
        for node, of_rank, memory in found:
            needed[node] += of_rank
            free[node] = min(memory, free.get(node, memory))
        full = [node for node in needed if needed[node] > HOST_SHARE * free[node]]
        if full and self._rank == 0:
            _log.info("checkpoint: training waits for it, as node %s has no room for a copy of the states", full[0])
        return not full

    # ------------------------------------------------------------- in the background

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except Exception as error:
                self._error = error
                warnings.warn(f"the checkpoint was not saved: {error}", stacklevel=1)

        # No daemon: the process ends when the checkpoint is there.
        self._thread = threading.Thread(target=run, name="partita checkpoint")
        self._thread.start()

    def _write(self, order: Order, partial: Path, layout: FileLayout, write: Callable[[Path], list[str]]) -> None:
        try:
            self._write_own(partial, layout, write)
            if self._rank == 0:
                self._await_tables(partial)
                self._publish(order, partial)
        except Exception as error:
            if self._rank > 0:
                with contextlib.suppress(PartitaError):  # where this cannot be written either, the lock tells
                    write_small(partial / f"__{self._rank}{FAILED_SUFFIX}", str(error).encode())
            raise
        finally:
            self._unlock()

    def _write_own(self, partial: Path, layout: FileLayout, write: Callable[[Path], list[str]]) -> None:
        name = _file_name(self._rank)
        sums = write(partial / name)
        table = partial / _table_name(self._rank)
        write_small(table.with_suffix(".new"), table_of(name, layout.records, sums, layout.num_bytes))
        with explained(table):
            table.with_suffix(".new").rename(table)

    def _await_tables(self, partial: Path) -> None:
        """Wait for the other ranks' files."""
        end = time.monotonic() + self._timeout_s
        left = set(range(self._num_ranks))
        while left:
            gone = {rank for rank in left & self._seen if not is_locked(partial / _lock_name(rank))}
            with explained(partial):  # after the locks: what a rank wrote before it let go is seen
                there = {path.name: path for path in partial.iterdir()}
            for failed in (path for path in there.values() if path.suffix == FAILED_SUFFIX):
                raise PartitaError(f"rank {failed.stem.strip('_')} could not write: {read_small(failed).decode()}")
            left = {rank for rank in left if _table_name(rank) not in there}
            if gone & left:
                raise PartitaError(
                    f"checkpoint: rank {min(gone & left)} ended before its file in '{partial}' was written: look at "
                    "its output first"
                )
            if left and time.monotonic() > end:
                raise PartitaError(
                    f"checkpoint: rank {min(left)} has not written its file in '{partial}' within "
                    f"{self._timeout_s:g} s (communication.timeout_s): look at its output; all ranks need the folder"
                )
            time.sleep(POLL_S if left else 0)

    @collector_paused()
    def _publish(self, order: Order, partial: Path) -> None:
        """Write index and manifest, and make the checkpoint visible."""
        stored, tables, files = Stored(partial), dict[str, str](), dict[str, int]()
        for rank in range(self._num_ranks):
            table = read_small(partial / _table_name(rank))
            tables[_table_name(rank)] = checksum(table)
            files[_file_name(rank)] = add_table(stored, table)
        aliases = self._content.aliases()
        add_aliases(stored, aliases)
        index = metadata_of(stored)
        write_small(partial / METADATA, index)
        manifest = {
            "format": FORMAT,
            SEQUENCE: next_sequence(order.folder),
            "step": order.step,
            **order.about,
            "tables": tables,
            "files": files,
            "metadata": checksum(index),
            "aliases": aliases,
        }
        write_small(partial / MANIFEST, manifest_bytes(manifest))
        publish(partial, order.step, order.keep)


def _file_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _table_name(rank: int) -> str:
    return f"__{rank}_0.json"


def _lock_name(rank: int) -> str:
    return f"__{rank}{LOCK_SUFFIX}"
