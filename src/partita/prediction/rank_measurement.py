"""One rank of a measured machine: all ranks compute, copy and send at the same time.

    python -m partita.prediction.rank_measurement PLACE FILE

PLACE is a :class:`RankSettings` as JSON. The measured points, or the error, are written to FILE as JSON.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partita.comm.connections import Processes
from partita.comm.group import Group
from partita.comm.mesh import Mesh
from partita.comm.world import Rendezvous
from partita.memory import accelerator
from partita.memory.allocate import allocate, allocate_host
from partita.memory.disk import Disk
from partita.prediction.processes import run_rank
from partita.table.mesh_shape import AXES, MeshShape
from partita.table.traffic import TrafficMeter

TIMEOUT_S = 60.0
# Seconds of a round of repetitions of a job, the minimal number of repetitions, and the number of rounds.
ROUND_S, MIN_REPETITIONS, ROUNDS = 0.03, 2, 3
# Sizes grow until a job takes longer than this.
LONGEST_S = 0.05
# Bytes that jobs use before they use a tensor again, more than the size of caches; and the maximal number of groups of
# tensors.
MIN_CYCLE_BYTES, MAX_GROUPS = 64 * 2**20, 32
DISK_BYTES = 64 * 2**20

Jobs = Sequence[Callable[[], object]]
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class RankSettings:
    """Settings of one rank.

    ``threads``: number of CPU threads. ``dtype``: the compute dtype. ``url``: the URL of the rendezvous. ``folder``:
    the folder of the disk tier.
    """

    rank: int
    num_ranks: int
    threads: int
    device: str
    dtype: str
    url: str
    folder: str


def measure_rank(settings: RankSettings) -> dict[str, Points]:
    """Return (size, seconds) points for each kind of job.

    The kinds are those of :class:`~partita.prediction.machine.Machine`, ``disk`` (bytes read) and ``copy`` (bytes
    between an accelerator and its host).

    Raises:
        PartitaError: the ranks cannot connect, or the disk cannot be written.
    """
    torch.set_num_threads(settings.threads)
    device = torch.device(settings.device)
    if not accelerator.is_host(device):
        accelerator.set_device(device)
    rendezvous = Rendezvous(settings.rank, settings.num_ranks, TIMEOUT_S, url=settings.url)
    mesh = Mesh(MeshShape(data=settings.num_ranks), device, Processes(device, rendezvous))
    try:
        group = Group(mesh.shape.named(AXES), mesh, TrafficMeter())
        clock = _Clock(group, device)
        kinds = _computing(device, getattr(torch, settings.dtype))
        if settings.num_ranks > 1:
            kinds |= _sending(group, device)
        found = {kind: clock.curve(sizes) for kind, sizes in kinds.items()}
        found["disk"] = [_read_disk(clock, settings)]
        return found
    finally:
        mesh.close()


class _Clock:
    """Timer of jobs: every rank runs the same number of them at the same time."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group = group
        self._device = device

    def curve(self, sizes: Iterator[tuple[float, Jobs]]) -> Points:
        found: Points = []
        for size, jobs in sizes:
            found.append((size, self.seconds(jobs)))
            if self.slowest(found[-1][1]) > LONGEST_S:
                break
        return found

    def seconds(self, jobs: Jobs) -> float:
        """Return the seconds of one of these equal jobs: the median of several rounds."""
        turns = cycle(jobs)
        once = min(self._run(turns, 1) for _ in range(2))
        times = max(MIN_REPETITIONS, int(ROUND_S / max(self.slowest(once), 1e-7)))
        rounds = sorted(self._run(turns, times) / times for _ in range(ROUNDS))
        return rounds[ROUNDS // 2]

    def once(self, job: Callable[[], object]) -> float:
        """Run a job once, and return its seconds on the slowest rank."""
        return self.slowest(self._run(iter([job]), 1))

    def slowest(self, seconds: float) -> float:
        """Return the largest value of all ranks, so that all of them make the same decisions."""
        return max(map(float, self._group.exchange_objects(seconds, "measuring this machine")))

    def _run(self, turns: Iterator[Callable[[], object]], times: int) -> float:
        self.slowest(0.0)  # a barrier: all ranks begin together
        accelerator.wait_for_all(self._device)
        start = time.perf_counter()
        for _ in range(times):
            next(turns)()
        accelerator.wait_for_all(self._device)
        return time.perf_counter() - start


def _computing(device: torch.device, dtype: torch.dtype) -> dict[str, Iterator[tuple[float, Jobs]]]:
    kinds = {
        "product": _products(device, dtype),
        "attention": _attention(device, dtype, backward=False),
        "attention_backward": _attention(device, dtype, backward=True),
        "convolution": _convolutions(device, dtype, backward=False),
        "convolution_backward": _convolutions(device, dtype, backward=True),
        "batch_norm": _batch_norms(device, dtype, backward=False),
        "batch_norm_backward": _batch_norms(device, dtype, backward=True),
        "pool": _pools(device, dtype),
        "element": _elements(device, dtype, torch.add, 3),
        "function": _elements(device, dtype, lambda x, _: F.gelu(x), 2),
        "update": _updates(device),
    }
    if not accelerator.is_host(device):
        kinds |= {"host_update": _updates(accelerator.HOST), "copy": _copies(device)}
    return kinds


def _tensors(shape: Sequence[int], device: torch.device, dtype: torch.dtype, each: int = 1) -> list[Tensor]:
    """Return groups of ``each`` tensors that together exceed the caches, at most :data:`MAX_GROUPS` groups."""
    num = max(1, min(MAX_GROUPS, MIN_CYCLE_BYTES // (dtype.itemsize * torch.Size(shape).numel() * each)))
    return [torch.full(tuple(shape), 0.1, device=device, dtype=dtype) for _ in range(each * num)]


def _products(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[float, Jobs]]:
    for size in (2**power for power in range(4, 14)):
        tensors = _tensors((size, size), device, dtype, 2)
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        yield 2.0 * size**3, _keeping_results([partial(torch.mm, x, y) for x, y in pairs])


def _attention(device: torch.device, dtype: torch.dtype, *, backward: bool) -> Iterator[tuple[float, Jobs]]:
    """Yield jobs of attention by their FLOPs.

    FLOPs are counted as in PyTorch's FLOP counter: for all pairs, two products in forward, and five in backward.
    """
    heads, width = 8, 64
    for length in (2**power for power in range(5, 14)):
        shape, flops = (1, heads, length, width), 4.0 * heads * length**2 * width
        tensors = [tensor.requires_grad_(backward) for tensor in _tensors(shape, device, dtype, 3)]
        triples = list(zip(tensors[::3], tensors[1::3], tensors[2::3], strict=True))
        sdpa = partial(F.scaled_dot_product_attention, is_causal=True)
        if not backward:
            yield flops, _keeping_results([partial(sdpa, *triple) for triple in triples])
            continue
        grad_output = torch.rand(*shape, device=device, dtype=dtype)
        backward_job = partial(torch.autograd.grad, grad_outputs=grad_output, retain_graph=True)
        yield 2.5 * flops, _keeping_results([partial(backward_job, sdpa(*triple), triple) for triple in triples])


def _convolutions(device: torch.device, dtype: torch.dtype, *, backward: bool) -> Iterator[tuple[float, Jobs]]:
    """Yield jobs of 3 x 3 convolutions by their FLOPs, with channels and image sizes that grow in turn.

    The backward has twice the FLOPs of the forward: for the gradients of images and of filters. There are two images,
    because a single small one runs in other kernels than a batch.
    """
    for width, channels in ((2**power, times * 2**power) for power in range(2, 9) for times in (1, 2)):
        images = _tensors((2, channels, width, width), device, dtype)
        filters = [image.new_full((channels, channels, 3, 3), 0.1) for image in images]
        flops = 2.0 * 9 * channels * images[0].numel()
        jobs = _on_images(partial(F.conv2d, padding=1), zip(images, filters, strict=True), backward=backward)
        yield (2 * flops if backward else flops), jobs


def _batch_norms(device: torch.device, dtype: torch.dtype, *, backward: bool) -> Iterator[tuple[float, Jobs]]:
    """Yield jobs of batch norm with the batch's own statistics, by bytes read and written.

    The backward reads two tensors and writes one.
    """

    def normalize(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.batch_norm(images, None, None, weight, bias, training=True)

    for images in _growing_images(device, dtype):
        scales = [image.new_ones(image.shape[1]) for image in images]
        jobs = _on_images(normalize, zip(images, scales, map(torch.clone, scales), strict=True), backward=backward)
        yield (3.0 if backward else 2.0) * images[0].nbytes, jobs


def _pools(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[float, Jobs]]:
    """Yield jobs of 3 x 3 max pooling with stride 2, by bytes read and written. Indices are written, too."""
    pool = partial(F.max_pool2d, kernel_size=3, stride=2, padding=1, return_indices=True)
    for images in _growing_images(device, dtype):
        maxima, block_numbers = pool(images[0])
        jobs = _on_images(pool, zip(images, strict=True), backward=False)
        yield float(images[0].nbytes + maxima.nbytes + block_numbers.nbytes), jobs


def _growing_images(device: torch.device, dtype: torch.dtype) -> Iterator[list[Tensor]]:
    return (_tensors((2, 64, width, width), device, dtype) for width in (2**power for power in range(2, 9)))


def _on_images(function: Callable[..., Any], groups: Iterable[Sequence[Tensor]], *, backward: bool) -> Jobs:
    """Return jobs that apply a function to each group of tensors, or compute its gradients with respect to them."""
    if not backward:
        return _keeping_results([partial(function, *group) for group in groups])
    jobs = list[Callable[[], object]]()
    for group in groups:
        result = function(*(tensor.requires_grad_() for tensor in group))
        jobs.append(partial(torch.autograd.grad, result, group, torch.rand_like(result), retain_graph=True))
    return _keeping_results(jobs)


def _elements(
    device: torch.device, dtype: torch.dtype, operator: Callable[[Tensor, Tensor], Tensor], touched: int
) -> Iterator[tuple[float, Jobs]]:
    for num in (2**power for power in range(8, 25, 2)):
        tensors = _tensors((num,), device, dtype, 2)
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        yield float(dtype.itemsize * touched * num), _keeping_results([partial(operator, *pair) for pair in pairs])


def _keeping_results(jobs: Jobs) -> Jobs:
    """Return jobs that keep their results until their next turn, as autograd keeps tensors for a while.

    New memory costs more than memory that is reused.
    """
    results = dict[int, object]()

    def job(at: int, of: Callable[[], object]) -> None:
        results[at] = of()

    return [partial(job, at, of) for at, of in enumerate(jobs)]


def _updates(device: torch.device) -> Iterator[tuple[float, Jobs]]:
    """Yield jobs of AdamW on fp32 master weights, by bytes read and written.

    Master weights and two moments are read and written, gradients are read, and parameters are written.
    """
    for num in (2**power for power in range(12, 23, 2)):
        jobs = list[Callable[[], object]]()
        for value in _tensors((num,), device, torch.float32, 4)[::4]:
            param = nn.Parameter(value)
            param.grad = torch.rand_like(value)
            jobs.append(torch.optim.AdamW([param], fused=True).step)
        yield 32.0 * num, jobs


def _copies(device: torch.device) -> Iterator[tuple[float, Jobs]]:
    for num in (2**power for power in range(12, 27, 4)):
        host = allocate_host(num, torch.float32, device)
        yield 4.0 * num, [partial(allocate(num, torch.float32, device).copy_, host)]


def _sending(group: Group, device: torch.device) -> dict[str, Iterator[tuple[float, Jobs]]]:
    return {"gather": _gathers(group, device), "reduce": _reductions(group, device)}


def _gathers(group: Group, device: torch.device) -> Iterator[tuple[float, Jobs]]:
    for num in (2**power for power in range(8, 23, 2)):
        shard, full = (allocate(size, torch.float32, device) for size in (num, num * group.size))

        def job(full: Tensor = full, shard: Tensor = shard) -> None:
            group.all_gather(full, shard).wait()

        yield 4.0 * num * (group.size - 1), [job]


def _reductions(group: Group, device: torch.device) -> Iterator[tuple[float, Jobs]]:
    for num in (2**power for power in range(8, 23, 2)):
        sent = allocate(num * group.size, torch.float32, device)
        received = allocate(group.received_elements(sent.numel(), 4), torch.float32, device)
        output = sent[group.index * num : (group.index + 1) * num]
        yield 4.0 * num * (group.size - 1), [partial(group.reduce_scatter, output, sent, received, accumulate=False)]


def _read_disk(clock: _Clock, settings: RankSettings) -> tuple[float, float]:
    disk = Disk(Path(settings.folder), f"partita-measured-{settings.rank}")
    try:
        values = allocate(DISK_BYTES // 4, torch.float32, accelerator.HOST).fill_(1.0)
        region = disk.reserve(DISK_BYTES)
        disk.write(region, values).wait()
        return float(DISK_BYTES), clock.once(lambda: disk.read(region, values).wait())
    finally:
        disk.close()


if __name__ == "__main__":
    settings = RankSettings(**json.loads(sys.argv[1]))
    sys.exit(run_rank(partial(measure_rank, settings), Path(sys.argv[2])))
