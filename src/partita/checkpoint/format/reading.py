"""Read-ahead of many checkpoint chunks. Adjacent chunks share a request, which bypasses the page cache.

The order is known before the first request, so the disk is kept busy with a bounded number of bytes in flight.
"""

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from partita.checkpoint.backend import Chunk
from partita.checkpoint.format.system import explain_os_errors, open_direct, read_into
from partita.memory.allocate import allocate

NUM_THREADS, RUN_BYTES, BYTES_AHEAD = 4, 8 * 2**20, 96 * 2**20
# Limit of the gap between two records that are read in one request: padding, or a record that is not needed.
GAP_BYTES = 64 * 2**10
PAGE = mmap.PAGESIZE


@dataclass
class _Run:
    """Chunks that are read in one request: bytes ``[start, stop)`` of a file, in full pages."""

    file: str
    start: int
    stop: int
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    def can_add(self, chunk: Chunk) -> bool:
        """Return True if a chunk is close enough to be read with this run, and fits into it."""
        begin, end = _pages(chunk)
        follows = chunk.file == self.file and self.stop - PAGE <= begin <= self.stop + GAP_BYTES
        return follows and end - self.start <= RUN_BYTES

    def add(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.stop = _pages(chunk)[1]

    def parts(self, content: memoryview) -> Iterator[tuple[Chunk, memoryview]]:
        """Yield each chunk with its bytes, given the bytes of the run."""
        for chunk in self.chunks:
            begin = chunk.offset - self.start
            yield chunk, content[begin : begin + chunk.num_bytes]


def _pages(chunk: Chunk) -> tuple[int, int]:
    return chunk.offset // PAGE * PAGE, -(-(chunk.offset + chunk.num_bytes) // PAGE) * PAGE


class ReadAhead:
    """A context manager over the values of ``chunks`` of a folder's files, in order. It closes its files and threads.

    Args:
        check: function that raises if a chunk's bytes are not those that were written.
        decode: function that returns a chunk's values from its bytes, in the shape of its box.
    """

    def __init__(
        self,
        folder: Path,
        chunks: Sequence[Chunk],
        check: Callable[[Chunk, memoryview], None],
        decode: Callable[[Chunk, memoryview], Tensor],
    ) -> None:
        self._folder = folder
        self._check = check
        self._decode = decode
        self._files = dict[Path, int]()
        self._lock = threading.Lock()
        self._memory = list[Tensor]()  # buffers that are not in use
        self._pool = ThreadPoolExecutor(NUM_THREADS, "partita load")
        self._tensors = self._ahead(_runs(chunks))

    def _ahead(self, runs: Iterator[_Run]) -> Iterator[Tensor]:
        in_flight, num_bytes = deque[tuple[_Run, Future[Tensor]]](), 0
        for run in runs:
            in_flight.append((run, self._pool.submit(self._read, run)))
            num_bytes += run.num_bytes
            while num_bytes > BYTES_AHEAD:
                num_bytes -= in_flight[0][0].num_bytes
                yield from self._decoded(*in_flight.popleft())
        while in_flight:
            yield from self._decoded(*in_flight.popleft())

    def _decoded(self, run: _Run, reading: Future[Tensor]) -> Iterator[Tensor]:
        memory = reading.result()
        for chunk, content in run.parts(memory.numpy().data):
            yield self._decode(chunk, content)
        self._memory.append(memory)

    def _borrow(self, num_bytes: int) -> Tensor:
        """Return memory for a run. It is reused, because touching new pages costs more than the read into them."""
        with self._lock:
            for place, memory in enumerate(self._memory):
                if memory.numel() >= num_bytes:
                    return self._memory.pop(place)
        return allocate(max(num_bytes, RUN_BYTES), torch.uint8, torch.device("cpu"))

    def _read(self, run: _Run) -> Tensor:
        """Read a run's bytes, and check each chunk."""
        path, last = self._folder / run.file, run.chunks[-1]
        with explain_os_errors(path):
            borrowed = self._borrow(run.num_bytes)
            memory = borrowed.numpy().data[: run.num_bytes]
            read_into(memory, last.offset + last.num_bytes - run.start, self._open(path), path, run.start)
        for chunk, content in run.parts(memory):
            self._check(chunk, content)
        return borrowed

    def _open(self, path: Path) -> int:
        with self._lock:
            if path not in self._files:
                self._files[path], _ = open_direct(path, os.O_RDONLY)
            return self._files[path]

    def __enter__(self) -> Iterator[Tensor]:
        return self._tensors

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for file in self._files.values():
            os.close(file)


def _runs(chunks: Sequence[Chunk]) -> Iterator[_Run]:
    run: _Run | None = None
    for chunk in chunks:
        if run is None or not run.can_add(chunk):
            if run is not None:
                yield run
            run = _Run(chunk.file, *_pages(chunk))
        run.add(chunk)
    if run is not None:
        yield run
