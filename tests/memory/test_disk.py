"""The disk tier: reads return what was written, in any order of requests, and nothing is left behind."""

import itertools
import os
import random
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from partita.memory.allocate import Mapping
from partita.memory.disk import ALIGNMENT, Disk
from tests.memory.scratch import BLOCK_BYTES, OPEN, bits, read, refuse, some

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.int64)
MODES = ("direct", "named", "buffered", "buffered after a request")
EDGES = (0, 1, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 10 * BLOCK_BYTES)


@pytest.fixture(params=MODES)
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    refuse(monkeypatch, request.param)
    with warnings.catch_warnings(action="ignore" if "buffered" in request.param else "error"):
        disk = Disk(tmp_path, "rank0")
    monkeypatch.setattr(os, "open", OPEN)
    assert disk.direct == ("buffered" not in request.param)
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    yield disk
    disk.close()


class Gate:
    """A system call that blocks until ``may`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, holds: Callable[[int], bool] = lambda _: True):
        self._call, self._holds, self.may, self.reached = getattr(os, name), holds, threading.Event(), threading.Event()
        monkeypatch.setattr(os, name, self)

    def __call__(self, file: int, views: Sequence[memoryview], offset: int) -> int:
        if self._holds(offset):
            self.reached.set()
            assert self.may.wait(60)
        moved: int = self._call(file, views, offset)
        return moved


def test_what_was_written_comes_back(disk: Disk) -> None:
    sizes = [*EDGES, *(random.randrange(20 * BLOCK_BYTES) for _ in range(30))]
    random.shuffle(sizes)
    tensors = [some(size, random.choice(DTYPES)) for size in sizes]
    regions = [disk.reserve(size) for size in sizes]
    for region, size in zip(regions, sizes, strict=True):
        assert region.offset % ALIGNMENT == region.num_bytes % ALIGNMENT == 0
        assert size <= region.num_bytes < size + ALIGNMENT
    kept = [bits(tensor) for tensor in tensors]
    for event in [disk.write(region, tensor) for region, tensor in zip(regions, tensors, strict=True)]:
        event.wait()
    for region, tensor, expected in zip(regions, tensors, kept, strict=True):
        assert bits(tensor) == expected
        assert bits(read(disk, region, tensor)) == expected
    moved = sum(map(len, kept))
    report = disk.report()
    assert (report.bytes_read, report.bytes_written) == (moved, moved)
    assert report.busy_s > 0.0


def test_a_read_leaves_what_lies_behind_it(disk: Disk) -> None:
    region, values, memory = disk.reserve(2 * BLOCK_BYTES), some(2 * BLOCK_BYTES), some(2 * BLOCK_BYTES)
    disk.write(region, values).wait()
    behind = memory[BLOCK_BYTES + 5 :].clone()
    disk.read(region, memory[: BLOCK_BYTES + 5]).wait()
    assert torch.equal(memory[: BLOCK_BYTES + 5], values[: BLOCK_BYTES + 5])
    assert torch.equal(memory[BLOCK_BYTES + 5 :], behind)


def test_requests_in_any_order_see_the_last_write_before_them(disk: Disk) -> None:
    sizes = [random.randrange(1, 5 * BLOCK_BYTES) for _ in range(6)]
    regions = [disk.reserve(size) for size in sizes]
    last = [some(size) for size in sizes]
    events = [disk.write(region, values) for region, values in zip(regions, last, strict=True)]
    reads: list[tuple[Tensor, Tensor]] = []
    for _ in range(200):
        number = random.randrange(6)
        if random.random() < 0.5:
            last[number] = some(sizes[number])
            events.append(disk.write(regions[number], last[number]))
        else:
            into = some(sizes[number])
            events.append(disk.read(regions[number], into))
            reads.append((into, last[number]))
    random.shuffle(events)
    for event in events:
        event.wait()
    assert reads
    assert all(torch.equal(into, expected) for into, expected in reads)


def test_a_read_waits_for_the_write_before_it_and_no_other(plain: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, quick = plain.reserve(2 * BLOCK_BYTES), plain.reserve(100)
    first, second, other = some(2 * BLOCK_BYTES), some(2 * BLOCK_BYTES), some(100)
    plain.write(slow, first).wait()
    gate = Gate(monkeypatch, "pwritev", lambda offset: offset < slow.num_bytes)
    plain.write(slow, second)
    into = some(2 * BLOCK_BYTES)
    done = plain.read(slow, into)
    plain.write(quick, other).wait()
    assert torch.equal(read(plain, quick, other), other)
    gate.may.set()
    done.wait()
    assert torch.equal(into, second)


def test_a_write_waits_for_the_read_before_it(plain: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    region, first, second, into = plain.reserve(5000), some(5000), some(5000), some(5000)
    plain.write(region, first).wait()
    gate = Gate(monkeypatch, "preadv")
    reading, writing = plain.read(region, into), plain.write(region, second)
    gate.may.set()
    writing.wait()
    reading.wait()
    assert torch.equal(into, first)
    assert torch.equal(read(plain, region, second), second)


def test_memory_stays_while_it_is_written(
    plain: Disk, monkeypatch: pytest.MonkeyPatch, mappings: list["weakref.ref[Mapping]"]
) -> None:
    values = some(BLOCK_BYTES)
    (mapping,) = mappings
    gate = Gate(monkeypatch, "pwritev")
    region, expected = plain.reserve(BLOCK_BYTES), values.clone()
    event = plain.write(region, values)
    del values
    assert gate.reached.wait(60)
    assert mapping() is not None
    gate.may.set()
    event.wait()
    assert mapping() is None, "nobody keeps what is done"
    assert torch.equal(read(plain, region, expected), expected)


@pytest.mark.parametrize("most", [ALIGNMENT, 2 * ALIGNMENT])
def test_requests_done_in_part_are_continued(plain: Disk, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    def in_part(call: Callable[..., int]) -> Callable[..., int]:
        def moved(file: int, views: Sequence[memoryview], offset: int) -> int:
            return call(file, [views[0][:most]], offset)

        return moved

    monkeypatch.setattr(os, "pwritev", in_part(os.pwritev))
    monkeypatch.setattr(os, "preadv", in_part(os.preadv))
    for size in (*EDGES, 5 * BLOCK_BYTES - 77):
        values, region = some(size), plain.reserve(size)
        plain.write(region, values).wait()
        assert torch.equal(read(plain, region, values), values)


def test_regions_are_reused_and_never_overlap(plain: Disk) -> None:
    sizes = [random.choice((0, 1, 4096, 5000, 20_000)) for _ in range(40)]
    lent = [plain.reserve(size) for size in sizes]
    values = [some(size) for size in sizes]
    for number, (region, size) in enumerate(zip(lent, sizes, strict=True)):
        plain.write(region, values[number])
        if random.random() < 0.5:
            plain.release(region)
            lent[number] = plain.reserve(size)
            assert lent[number].num_bytes == region.num_bytes
            values[number] = some(size)
            plain.write(lent[number], values[number])
    for region, expected in zip(lent, values, strict=True):
        assert torch.equal(read(plain, region, expected), expected)
    ends = sorted((region.offset, region.offset + region.num_bytes) for region in lent if region.num_bytes)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_nothing_is_left_after_close(tmp_path: Path) -> None:
    before, others = descriptors(), set(threading.enumerate())
    disk = Disk(tmp_path, "rank0", threads=3)
    region, values = disk.reserve(9 * BLOCK_BYTES), some(9 * BLOCK_BYTES)
    event = disk.write(region, values)
    own = set(threading.enumerate()) - others
    assert len(own) == 3
    disk.close()
    disk.close()
    event.wait()
    assert descriptors() == before
    for thread in own:
        thread.join(60)
        assert not thread.is_alive()
    with pytest.raises(AssertionError, match="closed"):
        disk.read(region, values)


def test_a_disk_that_is_dropped_ends_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, others = descriptors(), set(threading.enumerate())
    disk, gate = Disk(tmp_path, "rank0"), Gate(monkeypatch, "pwritev")
    region, values, into = disk.reserve(BLOCK_BYTES), some(BLOCK_BYTES), some(BLOCK_BYTES)
    disk.write(region, values)
    event = disk.read(region, into)
    own = set(threading.enumerate()) - others
    del disk
    gate.may.set()
    event.wait()
    assert torch.equal(into, values)
    for thread in own:
        thread.join(60)
    assert descriptors() == before


def test_tensors_that_cannot_be_moved(plain: Disk) -> None:
    region, values = plain.reserve(ALIGNMENT), some(2 * ALIGNMENT)
    for wrong, match in (
        (values[1:], "page-aligned"),
        (values, "for a region of"),
        (values[: 2 * 100 : 2], "not contiguous"),
        (torch.empty(10, device="meta"), "meta"),
    ):
        with pytest.raises(AssertionError, match=match):
            plain.write(region, wrong)
