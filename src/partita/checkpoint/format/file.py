"""A rank's data file in a checkpoint: consecutive records of values, each with its checksum.

The layout is known before anything is copied. So a file is either *streamed* through a few blocks of memory, or
*snapshot*: laid out in memory exactly as on disk, and written from there while training continues. Writes bypass the
page cache (O_DIRECT), which would add a copy.
"""

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from partita.checkpoint.format.record import BoxLayout, FileLayout, Part, Record
from partita.checkpoint.format.system import explain_os_errors, open_direct
from partita.memory.accelerator import HOST
from partita.memory.allocate import allocate_host
from partita.memory.collector import collector_paused
from partita.memory.disk import ALIGNMENT as PAGE_BYTES
from partita.memory.streams import Event, Workers, finish

# Kept small: touching new memory for the first time costs more than the copy into it.
BLOCK_BYTES = 2 * 2**20
NUM_BLOCKS, NUM_THREADS = 8, 4
# Spare bytes for a later checkpoint with larger values.
SPARE_BYTES = 2**20


class Snapshots:
    """The host memory in which a file is laid out before it is written. It is reused for the next checkpoint."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._boxes: BoxLayout | None = None  # the boxes whose frames are in the memory
        self._places = list[Tensor]()  # views of the boxes' values in the memory

    @property
    def num_bytes(self) -> int:
        return self._memory.numel()

    @collector_paused()
    def take(self, layout: FileLayout, batches: Iterable[list[Tensor]]) -> Tensor:
        """Copy values into the file's layout; return the file's bytes, which are valid until the next call.

        Args:
            batches: the flat values of each box, in batches.
        """
        if self._memory.numel() < layout.num_bytes:
            self._memory = self._memory.new_empty(0)  # freed before more is allocated
            self._places = []
            self._memory = allocate_host(layout.num_bytes + SPARE_BYTES, torch.uint8, self._device)
            self._boxes = None
        memory = self._memory[: layout.num_bytes]
        if layout.boxes is not self._boxes:
            self._boxes = None
            self._places = [_place(memory, record) for record in layout.boxes.records]
            _put(memory, layout.frame_parts())
        num_copied = 0
        for tensors in filter(None, batches):
            places = self._places[num_copied : num_copied + len(tensors)]
            torch._foreach_copy_(places, tensors, non_blocking=True)
            num_copied += len(tensors)
        assert num_copied == len(self._places), f"{num_copied} values for {len(self._places)} places"
        _put(memory, layout.others)
        finish(self._device)
        self._boxes = layout.boxes
        return memory


def _place(memory: Tensor, record: Record) -> Tensor:
    """Return a view of a box's values in the file's bytes."""
    assert record.value.box is not None
    begin = record.offset + record.head_bytes
    num_bytes = record.value.box.num_elements * record.value.dtype.itemsize
    return memory[begin : begin + num_bytes].view(record.value.dtype)


def _put(memory: Tensor, parts: Iterable[Part]) -> None:
    for offset, content in parts:
        memory[offset : offset + content.numel()] = content


def write_snapshot(path: Path, layout: FileLayout, memory: Tensor) -> list[str]:
    """Write a file from memory; return the checksum of each record when the file is on the disk."""
    with _Writer(path, layout) as writer:
        for block in memory.split(BLOCK_BYTES):
            writer.write(block)
        return writer.sums.digests


def stream_file(path: Path, layout: FileLayout, tensors: Iterator[Tensor], device: torch.device) -> list[str]:
    """Write a file from ``tensors`` through a few blocks of memory; return the same as :func:`write_snapshot`."""
    blocks = [allocate_host(BLOCK_BYTES, torch.uint8, device) for _ in range(NUM_BLOCKS)]
    used = [Event() for _ in blocks]
    with _Writer(path, layout) as writer:
        number = 0

        def flush(until: int) -> None:
            finish(device)
            block = blocks[number % NUM_BLOCKS][: until - number * BLOCK_BYTES]
            used[number % NUM_BLOCKS] = writer.write(block)

        for begin, content in layout.parts(tensors):
            offset, values = begin, content
            while values.numel():
                if offset >= (number + 1) * BLOCK_BYTES:
                    flush((number + 1) * BLOCK_BYTES)
                    number += 1
                    used[number % NUM_BLOCKS].wait()
                at = offset - number * BLOCK_BYTES
                num = min(values.numel(), BLOCK_BYTES - at)
                blocks[number % NUM_BLOCKS][at : at + num].copy_(values[:num], non_blocking=True)
                offset, values = offset + num, values[num:]
        flush(layout.num_bytes)
        return writer.sums.digests


class _Sums:
    """The checksums of records, computed from consecutive blocks of the file."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records
        self._number = 0
        self._hash = xxhash.xxh3_64()
        self.digests = list[str]()

    def update(self, start: int, block: Tensor) -> None:
        view, stop = block.numpy().data, start + block.numel()
        while self._number < len(self._records):
            record = self._records[self._number]
            end = record.offset + record.num_bytes
            self._hash.update(view[max(record.offset - start, 0) : max(end - start, 0)])
            if end > stop:
                return
            self.digests.append(self._hash.hexdigest())
            self._hash.reset()
            self._number += 1


class _Writer:
    """A new file, written in consecutive blocks.

    Leaving the context makes the file durable. After an error the partial file stays.
    """

    def __init__(self, path: Path, layout: FileLayout) -> None:
        self._path = path
        self._num_bytes = layout.num_bytes
        self._offset = 0
        self.sums = _Sums(layout.records)
        with explain_os_errors(path):
            self._file, self._direct = open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                _reserve(self._file, self._num_bytes)
            except OSError:
                os.close(self._file)
                raise
        self._workers = Workers("checkpoint", NUM_THREADS)
        self._events = list[Event]()

    def write(self, block: Tensor) -> Event:
        """Start to write a block, which must consist of full pages unless it is the last one.

        The block's memory must not change until the returned event.
        """
        offset, self._offset = self._offset, self._offset + block.numel()
        self.sums.update(offset, block)
        self._events.append(self._workers.run(offset, [partial(self._write, block, offset)]))
        return self._events[-1]

    def _write(self, block: Tensor, offset: int) -> None:
        view = block.numpy().data
        num_direct = len(view) // PAGE_BYTES * PAGE_BYTES if self._direct else len(view)
        done = 0
        while done < num_direct:
            done += os.pwrite(self._file, view[done:num_direct], offset + done)
        if rest := view[num_direct:]:
            page = allocate_host(PAGE_BYTES, torch.uint8, HOST)
            page[: len(rest)] = torch.frombuffer(rest, dtype=torch.uint8)
            os.pwrite(self._file, page.numpy().data, offset + num_direct)

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            with explain_os_errors(self._path):
                for event in self._events:
                    event.wait()
                os.ftruncate(self._file, self._num_bytes)
                os.fsync(self._file)
        finally:
            self._workers.close()
            os.close(self._file)


def _reserve(file: int, num_bytes: int) -> None:
    """Allocate the file's disk space, so that a full disk is detected before anything is copied."""
    try:
        if num_bytes:
            os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
