"""Results of the ZeRO papers on clusters, predicted: throughput per GPU over the number of GPUs, ZeRO-2 compared with
tensor parallelism across nodes, and the largest models. For the largest models, the engine itself trains a step in
every distinct role of a rank, on tensors without values.

    python -m benchmarks.papers --save    # into benchmarks/results/papers.md: 15 minutes
    python -m benchmarks.papers --quick   # two numbers of GPUs, one model, no steps

Times are predicted from data sheets (`partita plan`), for V100s with 32 GB, 16 in a node (DGX-2). Only the order of
plans and the shape of curves are meaningful. Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", 2020, figures 2 and 3.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from benchmarks._common import Report
from benchmarks._papers_tables import reach_rows, state_rows
from partita.errors import ConfigError
from partita.memory import accelerator
from partita.prediction.given_config import Estimate, estimate_config
from partita.prediction.machine import Machine, machine_named
from partita.prediction.model_source import ModelSource, read_source
from partita.prediction.simulate.cluster import Cluster, simulate
from partita.prediction.simulate.rank import SimulatedModel
from partita.table.residence import Tier

SCALED, WORLDS = "gpt-60b", (64, 96, 128, 192, 256, 400)
# The papers' largest models: name, number of GPUs, and config.
_MIXED = {"compute": "fp16", "gradients": "fp16"}
_ONE = {"activations": {"checkpoint": "units", "partition": True}, "batch": {"micro": 1, "accumulate": 2}}
LARGEST: tuple[tuple[str, int, dict[str, Any]], ...] = (
    (
        "gpt-170b",
        400,
        {**_ONE, "zero": {"stage": 2}, "parallel": {"tensor": 16}, "precision": {**_MIXED, "moments": "int8"}},
    ),
    (
        "gpt-1t",
        800,
        {
            "zero": {"stage": 3},
            "parallel": {"tensor": 16, "pipeline": 5},
            "precision": {**_MIXED, "moments": "int8"},
            "activations": {"checkpoint": "units", "partition": True},
            "batch": {"micro": 1, "accumulate": 10},
        },
    ),
    (
        "gpt-2t",
        512,
        {
            **_ONE,
            "zero": {"stage": 3, "offload": {"parameters": "host", "optimizer": "host"}},
            "parallel": {"tensor": 16},
            "precision": _MIXED,
        },
    ),
)
# Models, and the number of ranks that each needs with tensor parallelism alone.
COMPARED = (("gpt-8b", 16), ("gpt-40b", 32), ("gpt-60b", 64), ("gpt-100b", 64), ("gpt-170b", 64))
NUM_GPUS = 384
LARGEST_MICRO, CELLS = 64, 40

Sections = dict[str, Any]


def main() -> int:
    made = argparse.ArgumentParser(description="Results of the ZeRO papers on clusters")
    made.add_argument("--quick", action="store_true", help="two numbers of GPUs, one model")
    made.add_argument("--save", action="store_true", help="write the report into benchmarks/results/")
    options = made.parse_args()
    report = Report("The papers' figures of a cluster, predicted")
    report.begin()
    machine = machine_named("v100-32")
    worlds = WORLDS[:3:2] if options.quick else WORLDS
    rates = dict(_scaling(read_source(SCALED), machine, worlds))
    for title, of_table in (("Model states of a GPU", state_rows()), ("Models that fit", reach_rows())):
        if options.quick and title != "Model states of a GPU":
            continue
        report.write(f"{title}: the papers' claim, the result here, and the result with lean states.")
        report.write()
        header = ("case", "claimed", "here", "with lean states", "reason for the difference")
        report.table(header, ((row.case, row.claimed, row.ours, row.lean, row.why) for row in of_table))
    report.write(
        f"Throughput of a GPU, {SCALED}, ZeRO-2 x tensor 16, the micro-batch that is fastest of those that fit:"
    )
    report.write()
    most = max(rate for rate, _ in rates.values())
    bars = ((str(n), str(micro), f"{rate:.1f}", "█" * round(CELLS * rate / most)) for n, (rate, micro) in rates.items())
    report.table(("GPUs", "micro-batch", "TFLOP/s per GPU", ""), bars)
    known = [rate for rate, _ in rates.values()]
    report.expect(known[-1] > known[0], "more GPUs give more throughput per GPU")
    report.write(f"ZeRO-2 x tensor within a node, and tensor parallelism alone, {NUM_GPUS} GPUs:")
    report.write()
    header = ("model", "tensor alone", "its TFLOP/s per GPU", "ZeRO-2's (tensor 16)", "times")
    report.table(header, _compared(report, machine, COMPARED[2:3] if options.quick else COMPARED))
    if not options.quick:
        report.write(_OF_LARGEST)
        report.write()
        header = (
            "model",
            "GPUs",
            "config",
            "roles",
            "GPU GB",
            "of these activations",
            "host GB",
            "sent GB",
            "s to run",
        )
        report.table(header, _largest(report, machine))
    return report.end(options.save)


_OF_LARGEST = """A step of the largest models as every distinct role of a rank: the engine itself, on tensors without
values. *GPU GB*, *host GB*: the peak of a rank, for the role that uses least and for the one that uses
most; *s to run*: the time of all roles here, one after the other."""


def _largest(report: Report, machine: Machine) -> Iterator[list[str]]:
    for name, num_gpus, config in LARGEST:
        begun, source = time.perf_counter(), read_source(name)
        simulated_model = SimulatedModel(partial(_fresh, name), partial(source.batch, device=accelerator.SIMULATED))
        found = simulate(simulated_model, config, Cluster(num_gpus, "cuda", machine.gpus))
        seconds, budget = time.perf_counter() - begun, machine.budget(num_gpus)
        mesh = found.resolved.mesh
        words = (
            f"stage {config['zero']['stage']}, data x tensor x pipeline {mesh.data} x {mesh.tensor} x {mesh.pipeline}"
        )
        words += ", states on the host" if "offload" in config["zero"] else ""
        words += ", 8-bit moments" if "moments" in config["precision"] else ""
        words += ", inputs in parts" if "partition" in config["activations"] else ""
        for rank in found.ranks:
            shortfall = budget.shortfall(Counter(rank.bytes_by_tier))
            report.expect(not shortfall, f"{name}, {rank.role.coordinates}: fits on {machine.name}")
            exact = {key: num for key, num in rank.memory.held.items() if key in rank.planned_bytes}
            report.expect(
                exact == rank.planned_bytes, f"{name}, {rank.role.coordinates}: states as the closed forms say"
            )
        columns = (
            [rank.bytes_by_tier.get(Tier.DEVICE, 0) for rank in found.ranks],
            [rank.activation_bytes for rank in found.ranks],
            [rank.bytes_by_tier.get(Tier.HOST, 0) for rank in found.ranks],
            [rank.traffic.sent_bytes() for rank in found.ranks],
        )
        ranges = [f"{min(of_roles) / 1e9:.1f} - {max(of_roles) / 1e9:.1f}" for of_roles in columns]
        yield [name, str(num_gpus), words, str(len(found.ranks)), *ranges, f"{seconds:.0f}"]


def _fresh(name: str) -> nn.Module:
    return read_source(name).model


def _scaling(source: ModelSource, machine: Machine, worlds: tuple[int, ...]) -> Iterator[tuple[int, tuple[float, int]]]:
    for num_gpus in worlds:
        found = fastest(source, machine, num_gpus, {"zero": {"stage": 2}, "parallel": {"tensor": 16}})
        if found is not None:
            yield num_gpus, found


def _compared(report: Report, machine: Machine, models: tuple[tuple[str, int], ...]) -> Iterator[list[str]]:
    for name, tensor in models:
        source = read_source(name)
        alone = fastest(source, machine, NUM_GPUS, {"zero": {"stage": 0}, "parallel": {"tensor": tensor}})
        split = fastest(source, machine, NUM_GPUS, {"zero": {"stage": 2}, "parallel": {"tensor": 16}})
        shown = ["does not fit" if each is None else f"{each[0]:.1f}" for each in (alone, split)]
        times = "" if alone is None or split is None else f"{split[0] / alone[0]:.1f}"
        if alone is not None and split is not None and tensor > machine.gpus:
            report.expect(split[0] > alone[0], f"{name}: ZeRO-2 is faster than tensor parallelism across nodes")
        yield [name, f"tensor {tensor}", *shown, times]


def fastest(source: ModelSource, machine: Machine, num_gpus: int, sections: Sections) -> tuple[float, int] | None:
    """Return (TFLOP/s per GPU, micro-batch) of the fastest configuration with recomputed blocks.

    Return None if no micro-batch fits.
    """
    found, micro = list[tuple[float, int]](), 1
    precision = {"compute": "fp16", "gradients": "fp16"}
    while micro <= LARGEST_MICRO:
        config = {**sections, "precision": precision, "batch": {"micro": micro}, "activations": {"checkpoint": "units"}}
        try:
            given = estimate_config(source, config, num_gpus, "cuda")
        except ConfigError:
            if micro == 1:
                raise
            break
        if not _fits(given, machine, num_gpus):
            break
        flops = 6 * source.num_params * given.resolved.batch.total * (source.context or 1)
        found.append((flops / given.time(machine).total_s / num_gpus / 1e12, micro))
        micro *= 2
    return max(found, default=None)


def _fits(given: Estimate, machine: Machine, num_gpus: int) -> bool:
    held = given.held(given.stages[0])
    on_device = sum(num for (_, tier), num in held.items() if tier == Tier.DEVICE.value)
    return on_device <= machine.budget(num_gpus).device


if __name__ == "__main__":
    sys.exit(main())
