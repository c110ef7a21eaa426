"""The cost of checkpoints, compared with torch's DCP: bandwidth of saving and loading, the time that training waits,
and memory.

    python -m benchmarks.checkpoint            # 155M parameters with Adam on two ranks: 1.9 GB a checkpoint
    python -m benchmarks.checkpoint --quick    # a small model, no target
    python -m benchmarks.checkpoint --save     # into benchmarks/results/checkpoint.md
    python -m benchmarks.checkpoint --folder FOLDER   # on another disk

It ends with status 1 if a target is missed: 80 % of the bandwidth of bare requests, for the first save, too; a
background save stalls training at most 1.1 times as long as a plain copy takes; at most 1.2 times a rank's states of
additional memory.
"""

import gc
import itertools
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import partita
from benchmarks._common import Report, parser
from benchmarks._work import OPTIMIZER, Work
from partita.memory.allocate import allocate
from tests.kit.ranks import close_pool, on_ranks

RANKS, THREADS, BLOCK_BYTES = 2, 4, 8 * 2**20
WORK = Work(layers=48, width=512, heads=8, ffn_width=1408, batch=2, sequence=16)
QUICK_WORK = Work(layers=4, width=128, heads=4, ffn_width=352, batch=2, sequence=16)
REPS, STALLS = 4, 7
SHARE, STALL, MEMORY = 0.8, 1.1, 1.2
Row = dict[str, float]


def main() -> int:
    made = parser("Checkpoints", (RANKS,))
    made.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where they are written")
    options = made.parse_args()
    work = QUICK_WORK if options.quick else WORK
    report = Report("Checkpoints")
    report.begin()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = {name: worst(fn, folder, work) for name, fn in (("partita", ours), ("DCP on FSDP2", theirs))}
    mine = found["partita"]
    report.write(
        _TEXT.format(millions=mine["parameters"] / 1e6, gigabytes=RANKS * mine["bytes"] / 1e9, reps=REPS, stalls=STALLS)
    )
    report.write()
    report.table(["", *found, "target"], _rows(found, options.quick))
    if not options.quick:
        for what in ("first save", "save", "load"):
            share = mine[f"{what} bare s"] / mine[f"{what} s"]
            report.expect(share >= SHARE, f"{what}: {share:.2f} of the bare bandwidth")
        stall = mine["stall s"] / mine["copy s"]
        report.expect(stall <= STALL, f"a background save stalls training {stall:.2f} x as long as a copy takes")
        for what in ("save", "background save", "load"):
            most = mine[f"{what} memory"]
            report.expect(most <= MEMORY, f"{what}: {most:.2f} x the states of additional memory")
    return report.end(options.save)


_TEXT = """A decoder of {millions:.0f}M parameters in fp32 with AdamW ({gigabytes:.2f} GB of parameters and moments),
on two ranks at stage 3. Times are of the slower rank, the best of {reps} (of {stalls} for stall and copy; the first
save has its own row). *bare*: O_DIRECT requests of 8 MiB from four threads per rank for the same bytes, and fsync, in
turn with the figures that they are compared with. Files are read from the disk, not from the page cache. *stall*: the
time of the call that saves in the background, except the first; *copy*: a plain copy of a rank's states into existing
memory. *memory*: the peak of the process in addition to its states, in units of these."""


def _rows(found: dict[str, Row], quick: bool) -> Iterator[list[str]]:
    def row(title: str, show: Callable[[Row], str], target: str = "") -> list[str]:
        return [title, *(show(of) for of in found.values()), "" if quick else target]

    for what in ("first save", "save", "load"):
        yield row(f"{what}, GB/s", lambda of, what=what: f"{RANKS * of['bytes'] / of[f'{what} s'] / 1e9:.2f}")
        yield row(
            f"{what}, share of bare requests",
            lambda of, what=what: f"{of[f'{what} bare s'] / of[f'{what} s']:.2f}",
            f">= {SHARE}",
        )
    yield row("stall of a background save, s", lambda of: f"{of['stall s']:.3f}")
    yield row("the same, in units of a plain copy", lambda of: f"{of['stall s'] / of['copy s']:.2f}", f"<= {STALL}")
    yield row("the first one's stall, s", lambda of: f"{of['first stall s']:.3f}")
    for what in ("save", "background save", "load"):
        yield row(f"memory of a {what}", lambda of, what=what: f"{of[f'{what} memory']:.2f}", f"<= {MEMORY}")


def worst(fn: Callable[[str, Work], Row], folder: str, work: Work) -> Row:
    """Return, for each figure, the maximum over ranks."""
    by_rank = on_ranks(RANKS, fn, folder, work, timeout=600)
    close_pool()
    return {key: max(of_rank[key] for of_rank in by_rank) for key in by_rank[0]}


# ---------------------------------------------------------------------------------------------------- on the ranks


def timed(work: Callable[[], object]) -> float:
    """Return the seconds until the work is done on every rank."""
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def additional_peak(work: Callable[[], object], num_bytes: float) -> float:
    """Return the additional memory that the work uses at its peak, in units of ``num_bytes``."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    work()
    return (_status("VmHWM") - before) / num_bytes


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


class Bare:
    """Bare requests for a rank's bytes."""

    def __init__(self, folder: str, num_bytes: int) -> None:
        self._num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = allocate(min(self._num_bytes, 16 * BLOCK_BYTES), torch.uint8, torch.device("cpu"))
        self._memory = memory.random_(0, 256).numpy().data
        self._path = Path(folder) / f"bare-{dist.get_rank()}"

    def write(self) -> None:
        self._path.unlink(missing_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(file, 0, self._num_bytes)
        self._do(file, os.pwritev)
        os.fsync(file)
        os.close(file)

    def read(self) -> None:
        file = os.open(self._path, os.O_RDONLY | os.O_DIRECT)
        self._do(file, os.preadv)
        os.close(file)

    def _do(self, file: int, call: Callable[..., int]) -> None:
        def block(start: int) -> None:
            at = start % len(self._memory)
            view = self._memory[at : at + min(BLOCK_BYTES, self._num_bytes - start)]
            assert call(file, [view], start) == len(view)

        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(block, range(0, self._num_bytes, BLOCK_BYTES)))


def forget_pages(folder: Path) -> None:
    """Drop the files from the page cache, so that the next read goes to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(
    bare: Bare,
    save: Callable[[int], object],
    load: Callable[[int], object],
    path: Callable[[int], Path],
    num_bytes: float,
) -> Row:
    """Return the times of saving and loading, measured in turn with bare requests."""
    row: Row = {"first save bare s": timed(bare.write), "first save s": timed(lambda: save(0))}
    turns = [(timed(bare.write), timed(lambda n=n: save(n))) for n in range(1, REPS)]  # type: ignore[misc]
    row["save bare s"], row["save s"] = map(min, zip(*turns, strict=True))
    turns = []
    for number in range(1, REPS):
        forget_pages(path(number))
        turns.append((timed(bare.read), timed(lambda n=number: load(n))))  # type: ignore[misc]
    row["load bare s"], row["load s"] = map(min, zip(*turns, strict=True))
    row["save memory"] = additional_peak(lambda: save(REPS), num_bytes)
    row["load memory"] = additional_peak(lambda: load(REPS), num_bytes)
    return row


def ours(folder: str, work: Work) -> Row:
    def started(background: bool) -> partita.Engine:
        section = {"background": background, "keep": 2 * REPS}
        config = {"zero": {"stage": 3}, "optimizer": {"name": "adamw", **OPTIMIZER}, "checkpoint": section}
        engine = partita.initialize(work.build("meta"), config)
        tokens, targets = work.part_of_batch(0, dist.get_rank(), RANKS)
        engine.backward(engine(tokens, targets))
        engine.step()
        return engine

    with started(False) as engine:
        held = engine.memory_report().held
        num_bytes = float(held["parameters", "device"] + held["moments", "device"])
        target = Path(folder) / "ours"
        row = measure(
            Bare(folder, int(num_bytes)),
            lambda number: engine.save(target / str(number)),
            lambda number: engine.load(target / str(number)),
            lambda number: target / str(number),
            num_bytes,
        )
        row["parameters"] = sum(param.numel() for param in engine.module.parameters())
    row["bytes"] = num_bytes
    with started(True) as engine:
        stalls = []

        def save(number: int) -> None:
            start = time.perf_counter()
            engine.save(target / f"background-{number}")
            stalls.append(time.perf_counter() - start)

        row["background save memory"] = additional_peak(lambda: (save(0), engine.wait_for_checkpoint()), num_bytes)
        for number in range(1, STALLS):
            engine.wait_for_checkpoint()
            dist.barrier()
            save(number)
        engine.wait_for_checkpoint()
        states = [unit.segments[0].stored.lease().tensor for unit in engine._parts.runtime.units]
        states += [value for state in engine.optimizer.state.values() for key, value in state.items() if key != "step"]
        row["copy s"] = plain_copy(states)
    return row | {"first stall s": stalls[0], "stall s": min(stalls[1:])}


def plain_copy(states: list[torch.Tensor]) -> float:
    """Return the seconds of a copy of the states into existing memory, the best of a few."""
    copies = [state.clone() for state in states]
    times = []
    for _ in range(STALLS):
        dist.barrier()
        start = time.perf_counter()
        for target, state in zip(copies, states, strict=True):
            target.copy_(state)
        times.append(time.perf_counter() - start)
    return min(times)


def theirs(folder: str, work: Work) -> Row:
    model = work.build()
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    tokens, targets = work.part_of_batch(0, dist.get_rank(), RANKS)
    model(tokens, targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    tensors = [param.to_local() for param in model.parameters()]  # type: ignore[attr-defined]
    moments = [value.to_local() for of in optimizer.state.values() for key, value in of.items() if key != "step"]
    num_bytes = float(sum(tensor.nbytes for tensor in itertools.chain(tensors, moments)))
    target = Path(folder) / "theirs"
    row = measure(
        Bare(folder, int(num_bytes)),
        lambda number: dcp.save(state, checkpoint_id=target / str(number)),
        lambda number: dcp.load(state, checkpoint_id=target / str(number)),
        lambda number: target / str(number),
        num_bytes,
    )
    stalls = []

    def save(number: int) -> Any:
        start = time.perf_counter()
        saving = dcp.async_save(state, checkpoint_id=target / f"background-{number}")
        stalls.append(time.perf_counter() - start)
        return saving

    row["background save memory"] = additional_peak(lambda: save(0).result(), num_bytes)
    for number in range(1, STALLS):
        dist.barrier()
        save(number).result()
    row |= {"first stall s": stalls[0], "stall s": min(stalls[1:]), "copy s": plain_copy([*tensors, *moments])}
    return row | {"bytes": num_bytes, "parameters": float(sum(param.numel() for param in model.parameters()))}


if __name__ == "__main__":
    sys.exit(main())
