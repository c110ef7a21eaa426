"""Reading many chunks of a checkpoint, ahead of whoever uses them: neighbours in one request, past the page cache.

The order is known before the first request, so the disk is kept busy with a bounded number of bytes under way.
"""

import errno
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from partita.checkpoint.stored import Chunk, Stored
from partita.checkpoint.system import cut_off, explained
from partita.memory.allocate import allocate

NUM_THREADS, RUN_BYTES, BYTES_AHEAD = 4, 8 * 2**20, 96 * 2**20
# What lies between two records that are read together: another record that is not wanted, and padding.
GAP_BYTES = 64 * 2**10
PAGE = mmap.PAGESIZE


@dataclass
class _Run:
    """Chunks that are read in one request: bytes ``[start, stop)`` of a file, whole pages."""

    file: str
    start: int
    stop: int
    chunks: list[Chunk] = field(default_factory=list)

    def takes(self, chunk: Chunk) -> bool:
        """Whether a chunk is near enough, and there is room for it."""
        begin, end = _pages(chunk)
        follows = chunk.file == self.file and self.stop - PAGE <= begin <= self.stop + GAP_BYTES
        return follows and end - self.start <= RUN_BYTES

    def add(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.stop = _pages(chunk)[1]


def _pages(chunk: Chunk) -> tuple[int, int]:
    return chunk.offset // PAGE * PAGE, -(-(chunk.offset + chunk.num_bytes) // PAGE) * PAGE


class Reading:
    """The values of ``chunks``, in their order. A context manager, which lets go of files and threads."""

    def __init__(self, stored: Stored, chunks: Sequence[Chunk]) -> None:
        self._stored, self._files, self._lock = stored, dict[Path, int](), threading.Lock()
        self._memory = list[Tensor]()  # that nobody reads into or from
        self._pool = ThreadPoolExecutor(NUM_THREADS, "partita load")
        self._tensors = self._ahead(_runs(chunks))

    def next(self) -> Tensor:
        """The values of the next chunk, in the shape of its box.

        Raises:
            PartitaError: its file is missing or damaged.
        """
        return next(self._tensors)

    def _ahead(self, runs: Iterator[_Run]) -> Iterator[Tensor]:
        under_way, num_bytes = deque[tuple[_Run, Future[Tensor]]](), 0
        for run in runs:
            under_way.append((run, self._pool.submit(self._read, run)))
            num_bytes += run.stop - run.start
            while num_bytes > BYTES_AHEAD:
                num_bytes -= under_way[0][0].stop - under_way[0][0].start
                yield from self._take(*under_way.popleft())
        while under_way:
            yield from self._take(*under_way.popleft())

    def _take(self, run: _Run, reading: Future[Tensor]) -> Iterator[Tensor]:
        memory = reading.result()
        content = memory.numpy().data
        for chunk in run.chunks:
            begin = chunk.offset - run.start
            yield self._stored.decoded(chunk, content[begin : begin + chunk.num_bytes])
        self._memory.append(memory)

    def _borrow(self, num_bytes: int) -> Tensor:
        """Memory for a run. It is used again: new pages cost more than what is read into them."""
        with self._lock:
            for place, memory in enumerate(self._memory):
                if memory.numel() >= num_bytes:
                    return self._memory.pop(place)
        return allocate(max(num_bytes, RUN_BYTES), torch.uint8, torch.device("cpu"))

    def _read(self, run: _Run) -> Tensor:
        """A run's bytes, each chunk held against its checksum."""
        path, wanted = self._stored.folder / run.file, run.chunks[-1].offset + run.chunks[-1].num_bytes - run.start
        with explained(path):
            borrowed = self._borrow(run.stop - run.start)
            memory = borrowed.numpy().data[: run.stop - run.start]
            file, done = self._open(path), 0
            while done < wanted:
                moved = os.preadv(file, [memory[done:]], run.start + done)
                if not moved:
                    raise cut_off(path, run.start + done, run.start + wanted)
                done += moved
        for chunk in run.chunks:
            begin = chunk.offset - run.start
            self._stored.check(chunk, memory[begin : begin + chunk.num_bytes])
        return borrowed

    def _open(self, path: Path) -> int:
        with self._lock:
            if path not in self._files:
                try:
                    self._files[path] = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self._files[path] = os.open(path, os.O_RDONLY)
            return self._files[path]

    def __enter__(self) -> "Reading":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for file in self._files.values():
            os.close(file)


def _runs(chunks: Sequence[Chunk]) -> Iterator[_Run]:
    run: _Run | None = None
    for chunk in chunks:
        if run is None or not run.takes(chunk):
            if run is not None:
                yield run
            run = _Run(chunk.file, *_pages(chunk))
        run.add(chunk)
    if run is not None:
        yield run
