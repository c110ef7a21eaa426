"""The bandwidth that the disk tier reaches, compared with bare O_DIRECT requests of the same size.

    python -m benchmarks.disk                   # in the system's folder for temporary files: 2 GB must be free
    python -m benchmarks.disk --folder FOLDER   # on another disk
    python -m benchmarks.disk --quick           # little data, no target
    python -m benchmarks.disk --save            # into benchmarks/results/disk.md

It ends with status 1 if the target is missed: 90 % of the bandwidth of the bare requests, at every size.
"""

import argparse
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from benchmarks._common import RESULTS, ROOT, Report
from partita.memory.allocate import allocate
from partita.memory.disk import BLOCK_BYTES, Disk

THREADS = 4
# Sizes of offloaded units: from a block's parameters in 16 bits up to master weights and moments of a large block.
SIZES = (64_000_000, 128_000_000, 256_000_000, 400_000_000)
QUICK_SIZES = (20_000_000,)
SMALL_PAGES = ", pages of 4 KiB"
REPS, QUICK_REPS = 21, 2
TARGET = 0.9


def main() -> int:
    arguments = argparse.ArgumentParser(description="The disk's bandwidth")
    arguments.add_argument("--quick", action="store_true", help="little data, no target: does it run?")
    arguments.add_argument("--save", action="store_true", help=f"write the report into {RESULTS.relative_to(ROOT)}/")
    arguments.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="folder of the files")
    options = arguments.parse_args()
    report = Report("Disk")
    report.begin()
    sizes, reps = (QUICK_SIZES, QUICK_REPS) if options.quick else (SIZES, REPS)
    filesystem, mib = describe_filesystem(options.folder), BLOCK_BYTES // 2**20
    report.write(_TEXT.format(filesystem=filesystem, threads=THREADS, mib=mib, reps=reps))
    report.write()
    header = ["what", "MB", "bare GB/s", "disk tier GB/s", "share", "target", "median of turns"]
    report.table(header, _rows(report, options.folder, sizes, reps, options.quick))
    return report.end(options.save)


_TEXT = """Filesystem: {filesystem}.

A request for a full unit, from its submission to its end. *read beside write* is a read of one unit while another
one is written, as when one is updated and the next one fetched. *bare*: the same blocks of {mib} MiB as `os.preadv`
and `os.pwritev` calls of {threads} threads, on another O_DIRECT file. The two alternate for {reps} turns. Speeds and
*share* are of the fastest turn of each; the median of the shares of all turns is also shown, because other processes
slow single turns. The speed of the disk itself varies, so compare figures within a row only. The memory of the tier
requests huge pages; in the last rows it is on pages of 4 KiB, of which a request has many more."""


def _rows(report: Report, folder: Path, sizes: Sequence[int], reps: int, quick: bool) -> Iterator[list[str]]:
    for size, pages in [*((size, "") for size in sizes), (sizes[-1], SMALL_PAGES)]:
        make = _on_small_pages if pages else _on_huge_pages
        memory = [make(size).random_(0, 256) for _ in range(2)]
        bare, tier = Bare(folder, memory), Tier(folder, memory)
        for what, num_moved in (("write", 1), ("read", 1), ("read beside write", 2)):
            times = [_turn(bare, tier, what, first=bool(rep % 2)) for rep in range(-1, reps)][1:]  # one to warm up
            fastest = [min(column) for column in zip(*times, strict=True)]
            share, median = fastest[0] / fastest[1], statistics.median(bare_s / tier_s for bare_s, tier_s in times)
            if not quick:
                report.expect(share >= TARGET, f"{what} of {size / 1e6:.0f} MB: {share:.2f} of the bare bandwidth")
            speeds = (f"{num_moved * size / 1e9 / seconds:.2f}" for seconds in fastest)
            target = "" if quick else f">= {TARGET:.2f}"
            yield [what + pages, f"{size / 1e6:.0f}", *speeds, f"{share:.3f}", target, f"{median:.3f}"]
        bare.close()
        tier.close()


def _turn(bare: "Bare", tier: "Tier", what: str, first: bool) -> tuple[float, float]:
    """Return the seconds of the bare requests and of the tier; the bare requests run first if ``first`` is true."""
    seconds = {}
    for one in (bare, tier) if first else (tier, bare):
        start = time.perf_counter()
        one.run(what)
        seconds[one] = time.perf_counter() - start
    return seconds[bare], seconds[tier]


class Tier:
    """Two units in the disk tier."""

    def __init__(self, folder: Path, memory: Sequence[Tensor]) -> None:
        self._disk, self._memory = Disk(folder, "benchmark", threads=THREADS), memory
        self._regions = [self._disk.reserve(one.nbytes) for one in memory]
        for region, one in zip(self._regions, memory, strict=True):
            self._disk.write(region, one).wait()

    def run(self, what: str) -> None:
        events = []
        if "write" in what:
            events.append(self._disk.write(self._regions[0], self._memory[0]))
        if "read" in what:
            events.append(self._disk.read(self._regions[1], self._memory[1]))
        for event in events:
            event.wait()

    def close(self) -> None:
        self._disk.close()


class Bare:
    """The same transfers with system calls only, without the bytes after the last full page."""

    def __init__(self, folder: Path, memory: Sequence[Tensor]) -> None:
        self._size = memory[0].nbytes // mmap.PAGESIZE * mmap.PAGESIZE
        self._memory = [one.numpy().data[: self._size] for one in memory]
        self._file = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._file, 0, len(memory) * self._size)
        self._threads = ThreadPoolExecutor(THREADS)
        for number in range(len(memory)):
            self._do(self._blocks(os.pwritev, number))

    def run(self, what: str) -> None:
        blocks: list[Callable[[], None]] = []
        if "write" in what:
            blocks += self._blocks(os.pwritev, 0)
        if "read" in what:
            blocks += self._blocks(os.preadv, 1)
        self._do(blocks)

    def _do(self, blocks: Sequence[Callable[[], None]]) -> None:
        list(self._threads.map(lambda block: block(), blocks))

    def _blocks(self, call: Callable[..., int], number: int) -> list[Callable[[], None]]:
        def block(start: int) -> None:
            view = self._memory[number][start : start + BLOCK_BYTES]
            if call(self._file, [view], number * self._size + start) != len(view):
                raise RuntimeError("a request was not completed")

        return [lambda start=start: block(start) for start in range(0, self._size, BLOCK_BYTES)]  # type: ignore[misc]

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._file)


def _on_huge_pages(size: int) -> Tensor:
    return allocate(size, torch.uint8, torch.device("cpu"))


def _on_small_pages(size: int) -> Tensor:
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def describe_filesystem(folder: Path) -> str:
    """Return the type and the device of a folder's filesystem, as Linux reports them."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, system = line.partition(" - ")
        if mount.split()[2] == number:
            kind = system.split()[0]
            break
    else:
        kind = "unknown"
    block = Path("/sys/dev/block", number)
    return f"{kind} on {block.resolve().name}" if block.exists() else f"{kind}, without a block device of its own"


if __name__ == "__main__":
    sys.exit(main())
