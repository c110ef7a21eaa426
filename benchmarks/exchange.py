"""The cost of an all-gather of two ranks, in memory and over gloo: processor time and wall time, alone and while matrix
products run; and the cost of a small message.

    python -m benchmarks.exchange            # 48 MiB a part
    python -m benchmarks.exchange --quick    # 1 MiB a part, once
    python -m benchmarks.exchange --save     # into benchmarks/results/exchange.md

All methods take turns within a repetition, in the same processes. The minimum over the repetitions counts, so that
other processes matter little. It ends with status 1 if partita's gather takes more processor time than torch's.
"""

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks._common import Report, parser
from partita.comm.collectives import Collectives
from partita.comm.connections import Processes
from partita.comm.mesh import Mesh
from partita.comm.world import Rendezvous
from partita.memory.capacity import usable_cores
from partita.memory.streams import Stream
from partita.table.mesh_shape import MeshShape

TIMEOUT_S = 600
GATHER, IN_MEMORY, TORCHS, COPY, MESSAGE = (
    "partita's gather over the network",
    "partita's gather in memory",
    "torch's all-gather",
    "a copy in memory",
    "a message of 8 bytes",
)
# Gathers of a step of the decoder in benchmarks/step_time.py at stage 3: 9 units, forward and backward, and the step.
NUM_MESSAGES = 19


@dataclass(frozen=True)
class Size:
    """Sizes of a measurement.

    Attributes:
        part_bytes: bytes of a rank's part.
        num: exchanges per measurement.
        num_products: concurrent matrix products ``[256, width] x [width, width]``.
        reps: repetitions.
    """

    part_bytes: int = 48 << 20
    num: int = 2
    num_products: int = 60
    width: int = 1024
    reps: int = 7


QUICK = Size(part_bytes=1 << 20, num_products=5, width=256, reps=1)


@dataclass(frozen=True)
class Cost:
    """The cost of one exchange on a rank, in ms. ``added``: the time that it adds to the concurrent matrix products."""

    wall: float
    cpu: float
    added_wall: float
    added_cpu: float


class Rank:
    """One rank, which measures all methods in turn."""

    def __init__(self, rank: int, num_ranks: int, size: Size) -> None:
        self.rank, self.num_ranks, self.size = rank, num_ranks, size
        device = torch.device("cpu")
        over_network, in_memory = (
            Collectives(
                Mesh(
                    MeshShape(data=num_ranks),
                    device,
                    Processes(device, Rendezvous(rank, num_ranks, TIMEOUT_S, within_node=within_node)),
                )
            )
            for within_node in ("network", "memory")
        )
        in_memory.open(())
        self.group, self.in_memory = over_network.all_ranks, in_memory.all_ranks
        self.stream = Stream(device, "exchange")
        num = size.part_bytes // 4
        self.part, self.whole = torch.ones(num), torch.zeros(num * num_ranks)
        self.rows = list(self.whole.view(num_ranks, -1))
        self.message = torch.zeros(1, dtype=torch.int64)
        self.left, self.right = torch.randn(256, size.width), torch.randn(size.width, size.width)
        self.product = torch.empty(256, size.width)

    def ways(self) -> dict[str, Callable[[], object]]:
        return {
            COPY: lambda: self.rows[0].copy_(self.part),
            IN_MEMORY: lambda: self.in_memory.all_gather(self.whole, self.part).wait(),
            GATHER: lambda: self.group.all_gather(self.whole, self.part).wait(),
            "over the network, sends posted first": self._sends_first,
            "broadcasts": self._broadcasts,
            TORCHS: lambda: dist.all_gather(self.rows, self.part),
            "torch's all-reduce of a part": lambda: dist.all_reduce(self.rows[0]),
            MESSAGE: self._messages,
        }

    def _sends_first(self) -> None:
        self.rows[self.rank].copy_(self.part)
        works = []
        for distance in range(1, self.num_ranks):
            source, target = (self.rank - distance) % self.num_ranks, (self.rank + distance) % self.num_ranks
            works.append(dist.isend(self.part, group_dst=target))
            works.append(dist.irecv(self.rows[source], group_src=source))
        for work in works:
            assert work is not None
            work.wait()

    def _broadcasts(self) -> None:
        self.rows[self.rank].copy_(self.part)
        works = [dist.broadcast(row, group_src=source, async_op=True) for source, row in enumerate(self.rows)]
        for work in works:
            assert work is not None
            work.wait()

    def _messages(self) -> None:
        """Send one message for each gather of a step."""
        for _ in range(NUM_MESSAGES):
            self.group.exchange(self.message, "a benchmark").wait()

    def _products(self) -> None:
        for _ in range(self.size.num_products):
            torch.mm(self.left, self.right, out=self.product)

    def measure(self) -> dict[str, Cost]:
        """Return the minimum of each timing over the repetitions."""
        products: Tensor | None = None
        alone: dict[str, Tensor] = {}
        both: dict[str, Tensor] = {}
        for repetition in range(self.size.reps + 1):
            for name, way in self.ways().items():
                times = self._timed(lambda way=way: self._repeat(way))
                beside = self._timed(lambda way=way: self._beside_products(way))
                idle = self._timed(self._products)
                if repetition:  # the first repetition opens connections
                    alone[name] = torch.minimum(alone.get(name, times), times)
                    both[name] = torch.minimum(both.get(name, beside), beside)
                    products = idle if products is None else torch.minimum(products, idle)
        assert products is not None
        added = {name: beside - products for name, beside in both.items()}
        return {
            name: Cost(*(float(x) / self.size.num * 1e3 for x in (*alone[name], *added[name]))) for name in self.ways()
        }

    def _repeat(self, way: Callable[[], object]) -> None:
        for _ in range(self.size.num):
            way()

    def _beside_products(self, way: Callable[[], object]) -> None:
        done = self.stream.run(lambda: self._repeat(way))
        self._products()
        done.wait()

    def _timed(self, work: Callable[[], object]) -> Tensor:
        """Return the seconds of wall time and the seconds of processor time of all threads, as means over the ranks."""
        dist.barrier()
        begin = time.perf_counter(), time.process_time()
        work()
        spent = torch.tensor([time.perf_counter() - begin[0], time.process_time() - begin[1]], dtype=torch.float64)
        dist.all_reduce(spent)
        return spent / self.num_ranks


def _main_of_rank(rank: int, num_ranks: int, size: Size, file: str, answers: "multiprocessing.Queue[object]") -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(max(1, usable_cores() // num_ranks))
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=num_ranks)
    one = Rank(rank, num_ranks, size)
    costs = one.measure()
    if rank == 0:
        answers.put(costs)
    one.stream.close()
    dist.barrier()
    dist.destroy_process_group()


def _run(num_ranks: int, size: Size) -> dict[str, Cost]:
    """Start the ranks and return their measurements."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (num_ranks, size, f"{folder}/store", answers)
        ranks = [
            context.Process(target=_main_of_rank, args=(rank, *arguments), daemon=True) for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        costs: dict[str, Cost] = answers.get(timeout=TIMEOUT_S)
        for process in ranks:
            process.join(TIMEOUT_S)
    return costs


def main() -> int:
    options = parser("What an exchange costs", (2,)).parse_args()
    size, worlds = (QUICK, [2]) if options.quick else (Size(), options.ranks)
    report = Report("Exchange")
    report.begin()
    report.write(_TEXT.format(megabytes=size.part_bytes >> 20, num_messages=NUM_MESSAGES, reps=size.reps))
    report.write()
    costs = {world: _run(world, size) for world in worlds}
    header = ["ranks", "way", "ms", "CPU ms", "beside products: ms more", "CPU ms more"]
    rows = [
        [str(world), _title(name), *(f"{x:.1f}" for x in (one.wall, one.cpu, one.added_wall, one.added_cpu))]
        for world, every in costs.items()
        for name, one in every.items()
        if name in (options.only or every)
    ]
    report.table(header, rows)
    for world, every in costs.items():
        mine, theirs = every[GATHER].cpu, every[TORCHS].cpu
        if not options.quick:
            report.expect(
                mine <= theirs, f"partita's gather takes {mine:.1f} CPU ms on {world} ranks, torch's {theirs:.1f}"
            )
    return report.end(options.save)


def _title(name: str) -> str:
    return f"{NUM_MESSAGES} messages of 8 bytes" if name == MESSAGE else name


_TEXT = """Every rank has a part of {megabytes} MiB, and gets the parts of all. *CPU ms*: processor time of all of a
rank's threads, system included. *beside products*: matrix products run at the same time; their own time is not
counted, but the time that they lose by the exchange is. Figures are means over the ranks, and minima of {reps}
repetitions in which the methods take turns.

Predicted: an exchange is at least three copies of the part: from memory into the socket's buffers, out of these, and
from the part into the full tensor. {num_messages} messages are those that would accompany the gathers of a step."""


if __name__ == "__main__":
    sys.exit(main())
