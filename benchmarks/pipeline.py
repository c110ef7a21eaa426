"""Idle time of pipelines by schedule, and the cost of off-stage blocks.

    python -m benchmarks.pipeline            # 2 and 4 ranks, about ten minutes
    python -m benchmarks.pipeline --quick    # short sleeps, few shapes, once: no targets
    python -m benchmarks.pipeline --save     # into benchmarks/results/pipeline.md

Stages sleep instead of computing, so that more stages than the machine has cores can work at the same time. Each
schedule runs with short and with long sleeps. The additional time of the batch with long sleeps consists of sleeps and
bubble, because everything else takes the same time. It ends with status 1 if a stage idles over 5 % more or less than
in its simulated schedule, or if an off-stage block takes more than 30 microseconds of a micro-batch.
"""

import gc
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import partita
from benchmarks._common import Report, parser
from partita.parallel.pipeline.edges import Edges
from partita.parallel.pipeline.run import Pipeline
from partita.parallel.pipeline.schedule import Shape, make_schedule
from partita.parallel.pipeline.schedule_cost import simulate
from partita.train.decoder import Decoder, DecoderShape

TIMEOUT_S = 600
TOLERANCE, MOST_US = 0.05, 30.0
IDLE, OFF_STAGE = "idle", "off_stage"  # for --only
# The result of `naps`.
_Napped = tuple[float, float, float, float]
# (name of the schedule, stages per rank)
ORDERS = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1))
LENGTH, VOCAB, WIDTH = 16, 64, 32


@dataclass(frozen=True)
class Size:
    """Sizes of the measurement.

    Attributes:
        forward_s: short and long sleep of all stages of a rank in the forward of a micro-batch; backward takes twice as
            long, half of it for the weights.
        micros: numbers of micro-batches.
        depths: numbers of off-stage blocks.
        num_measured: micro-batches over which the cost of off-stage blocks is measured.
    """

    forward_s: tuple[float, float] = (0.1, 0.4)
    micros: tuple[int, ...] = (4, 8, 16)
    depths: tuple[int, ...] = (8, 32, 128)
    num_measured: int = 100


QUICK = Size(forward_s=(0.004, 0.008), micros=(4,), depths=(4, 8), num_measured=4)


# -- stages that sleep -------------------------------------------------------------------------------------------------


@dataclass
class Clock:
    """The sleeps of this rank.

    Attributes:
        awake: if True, do not sleep.
        slept: seconds of all sleeps.
        first, last: the beginning of the first sleep and the end of the last one, on the machine's monotonic clock.
    """

    awake: bool = True
    slept: float = 0.0
    first: float = 0.0
    last: float = 0.0

    def sleep(self, seconds: float) -> None:
        if self.awake:
            return
        begin = time.monotonic()
        time.sleep(seconds)
        self.last = time.monotonic()
        self.first = self.first or begin
        self.slept += self.last - begin


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, nap: Callable[[], None]) -> Tensor:
        ctx.nap = nap
        nap()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.nap()
        return gradient, None


class Sleeping(nn.Module):
    """A block that sleeps equally long in forward, for its input's gradient, and for its weight's gradient."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.product = nn.Linear(4, 4, bias=False)
        self.nap = lambda: clock.sleep(seconds)
        self.product.weight.register_hook(lambda gradient: self.nap())

    def forward(self, x: Tensor) -> Tensor:
        return _Nap.apply(self.product(x), self.nap)


def naps(order: str, chunks: int, micros: int, forward_s: float) -> _Napped:
    """Train a batch; return the seconds that this rank's stages sleep, the times at which their first sleep begins and
    their last one ends, and the seconds of the complete batch.
    """
    clock, ranks = Clock(), dist.get_world_size()
    model = nn.Sequential(*(Sleeping(clock, forward_s / chunks) for _ in range(ranks * chunks)))
    config = {
        "parallel": {"pipeline": ranks, "schedule": order, "chunks": chunks},
        "zero": {"stage": 1},
        "batch": {"micro": 2, "accumulate": micros},
    }
    batches = [torch.randn(2, 4)] * micros
    with partita.initialize(model, config, loss_fn=lambda output, _: output.square().mean()) as engine:
        for _ in range(2):  # the first batches also exchange shapes and compare samples
            engine.train_batch(batches)
        gc.collect()  # otherwise garbage is collected during the batch, which takes 140 ms
        dist.barrier()
        clock.awake, begin = False, time.monotonic()
        engine.train_batch(batches)
        return clock.slept, clock.first, clock.last, time.monotonic() - begin


# -- off-stage blocks --------------------------------------------------------------------------------------------------


def llama(num_blocks: int) -> tuple[nn.Module, str, dict[str, Tensor]]:
    """Return a model of transformers, the name of its last block, and a batch."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_attention_heads": 2, "vocab_size": VOCAB}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=num_blocks, **sizes))
    tokens = torch.randint(VOCAB, (2, LENGTH))
    batch = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}
    return model, f"model.layers.{num_blocks - 1}", batch


def decoder(num_blocks: int) -> tuple[nn.Module, str, dict[str, Tensor]]:
    """Return partita's own decoder, the name of its last block, and a batch."""
    model = Decoder(DecoderShape(num_blocks, WIDTH, heads=2, kv_heads=2, ffn_width=WIDTH, vocab=VOCAB))
    tokens = torch.randint(VOCAB, (2, LENGTH))
    return model, f"blocks.{num_blocks - 1}", {"tokens": tokens, "targets": tokens}


MODELS = {"LlamaForCausalLM of transformers": llama, "partita's Decoder": decoder}


def until_received(model: str, num_off_stage: int, size: Size) -> float:
    """Return the seconds from the beginning of the last stage's forward until it waits for the input of its only block,
    as the median over micro-batches.
    """
    module, last, batch = MODELS[model](num_off_stage + 1)
    config = {"parallel": {"pipeline": 2, "cut": [last]}, "batch": {"micro": 2, "accumulate": size.num_measured}}
    began, spent = list[float](), list[float]()
    forward, receive = Pipeline.forward, Edges.receive

    def begin(*args: Any) -> Any:
        began.append(time.perf_counter())
        return forward(*args)

    def end(*args: Any) -> Any:
        spent.append(time.perf_counter() - began[-1])
        return receive(*args)

    Pipeline.forward, Edges.receive = begin, end  # type: ignore[method-assign]
    try:
        with partita.initialize(module, config) as engine:
            engine.train_batch([batch] * size.num_measured)
            spent.clear()
            engine.train_batch([batch] * size.num_measured)
    finally:
        Pipeline.forward, Edges.receive = forward, receive  # type: ignore[method-assign]
    return statistics.median(spent) if spent else 0.0


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the least-squares line through points ``(x, y)``."""
    return statistics.linear_regression(*zip(*points, strict=True)).slope


# -- ranks -------------------------------------------------------------------------------------------------------------


def on_ranks(num_ranks: int, work: Callable[..., Any], *calls: tuple[Any, ...]) -> list[list[Any]]:
    """Call ``work`` with each tuple of arguments on ``num_ranks`` processes; return the results by call and rank."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (num_ranks, f"{folder}/store", work, calls, answers)
        ranks = [
            context.Process(target=_main_of_rank, args=(rank, *arguments), daemon=True) for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        found: list[list[Any]] = answers.get(timeout=TIMEOUT_S)
        for process in ranks:
            process.join(TIMEOUT_S)
    return found


def _main_of_rank(
    rank: int,
    num_ranks: int,
    file: str,
    work: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    answers: "multiprocessing.Queue[object]",
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    logging.getLogger("partita").setLevel(logging.WARNING)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=num_ranks)
    torch.manual_seed(0)
    every = list[list[Any]]()
    for call in calls:
        rows: list[Any] = [None] * num_ranks
        dist.all_gather_object(rows, work(*call))
        every.append(rows)
    if rank == 0:
        answers.put(every)
    dist.barrier()
    dist.destroy_process_group()


# -- report ------------------------------------------------------------------------------------------------------------


def main() -> int:
    options = parser("Idle time of pipelines, and the cost of off-stage blocks", (2, 4)).parse_args()
    size = QUICK if options.quick else Size()
    report = Report("Pipeline")
    report.begin()
    chosen = options.only or (IDLE, OFF_STAGE)
    if IDLE in chosen:
        report.write(_TEXT_IDLE.format(*(seconds * 1e3 for seconds in size.forward_s)))
        report.write()
        header = ["ranks", "micro-batches", "order", "stages per rank", "on paper", "measured, by rank"]
        header += ["off by at most", "beside naps, per micro-batch", "as it is", "before and after"]
        report.table(header, _idle(report, options, size))
    if OFF_STAGE in chosen:
        report.write(_TEXT_OFF_STAGE)
        report.write()
        header = ["model", *(f"{depth} off-stage" for depth in size.depths), "us per block"]
        report.table(header, _off_stage(report, options, size))
    return report.end(options.save)


_TEXT_IDLE = """Each stage sleeps in the forward of a micro-batch (a rank's stages together), as long for the gradient
of its input, and as long for that of its weight: {:g} ms in one batch and {:g} ms in another. The time of a batch is
that from the beginning of any rank's first sleep to the end of the last one. *measured*: of the time that the longer
sleeps add to the batch, the share in which a rank does not sleep. *on paper*: the simulated schedule with those times,
which is (p-1)/(m+p-1) for p ranks and m micro-batches under `gpipe` and `1f1b`, (p-1)/(mv+p-1) for v stages per rank
under `interleaved`, and (p-1)/(3m+p-1) under `zero_bubble`. *beside naps*: milliseconds per micro-batch that do not
depend on the sleeps (the model's own forward and backward, communication, and process switches). *as it is*: the share
of the batch with long sleeps in which ranks do not sleep, on average, these milliseconds included. *before and after*:
milliseconds of the batch outside its time, in which ranks compare samples, reduce norm and loss, and update."""

_TEXT_OFF_STAGE = """The last of two ranks runs only the last block of a model. Microseconds from the beginning of its
forward until it waits for the input of that block, a median over micro-batches; *us per block*: the slope over the
off-stage blocks."""


def _idle(report: Report, options: Namespace, size: Size) -> Iterator[list[str]]:
    for ranks in [2] if options.quick else options.ranks:
        cells = [(*order, micros) for micros in size.micros for order in ORDERS]
        every = iter(on_ranks(ranks, naps, *((*cell, seconds) for cell in cells for seconds in size.forward_s)))
        for (order, chunks, micros), short, long in zip(cells, every, every, strict=True):
            expected = simulate(make_schedule(order, Shape(ranks, micros, chunks))).bubble
            found = Idle.of(short, long, size)
            off = max((share / expected - 1 for share in found.shares), key=abs)
            what = f"{order} on {ranks} ranks, {micros} micro-batches: idles {off:+.1%} beside what it does on paper"
            report.expect(options.quick or abs(off) <= TOLERANCE, what)
            shares = " ".join(f"{share:.4f}" for share in found.shares)
            cell = [str(ranks), str(micros), order, str(chunks), f"{expected:.4f}", shares, f"{off:+.1%}"]
            yield [
                *cell,
                f"{found.beside_s / micros * 1e3:.1f}",
                f"{found.as_it_is:.4f}",
                f"{found.around_s * 1e3:.1f}",
            ]


@dataclass(frozen=True)
class Idle:
    """Idle time of a schedule.

    Attributes:
        shares: for each rank, the idle share of the time that longer sleeps add to a batch.
        beside_s: seconds of a batch that do not depend on the sleeps.
        as_it_is: the mean idle share of the batch with long sleeps.
        around_s: seconds before the first sleep and after the last one.
    """

    shares: tuple[float, ...]
    beside_s: float
    as_it_is: float
    around_s: float

    @classmethod
    def of(cls, short: Sequence[_Napped], long: Sequence[_Napped], size: Size) -> "Idle":
        (slept, lasted, _), (slept_long, lasted_long, around) = _spans(short), _spans(long)
        added = lasted_long - lasted
        shares = tuple(1 - (more - less) / added for less, more in zip(slept, slept_long, strict=True))
        ratio = size.forward_s[0] / (size.forward_s[1] - size.forward_s[0])
        return cls(shares, lasted - added * ratio, 1 - statistics.mean(slept_long) / lasted_long, around)


def _spans(by_rank: Sequence[_Napped]) -> tuple[tuple[float, ...], float, float]:
    """Return each rank's seconds of sleep, the seconds from the first to the last sleep, and those before and after."""
    slept, first, last, whole = zip(*by_rank, strict=True)
    lasted = max(last) - min(first)
    return slept, lasted, max(whole) - lasted


def _off_stage(report: Report, options: Namespace, size: Size) -> Iterator[list[str]]:
    cells = [(name, depth, size) for name in MODELS for depth in size.depths]
    last = {cell[:2]: found[-1] * 1e6 for cell, found in zip(cells, on_ranks(2, until_received, *cells), strict=True)}
    for name in MODELS:
        us = slope([(depth, last[name, depth]) for depth in size.depths])
        report.expect(options.quick or us <= MOST_US, f"{name}: {us:.1f} us for an off-stage block, of {MOST_US:g}")
        yield [name, *(f"{last[name, depth]:.0f}" for depth in size.depths), f"{us:.1f}"]


if __name__ == "__main__":
    sys.exit(main())
