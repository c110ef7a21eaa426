"""What is learned over wires that carry fewer bytes, beside full ones at equal steps.

    python -m benchmarks.wires             # all wires, two seeds, 3,000 steps on 4 ranks: several hours
    python -m benchmarks.wires --quick     # three wires, 30 steps of a small model: no targets
    python -m benchmarks.wires --short     # fifteen wires, one seed, a small model: minutes, no targets; wires_short.md
    python -m benchmarks.wires --save      # into benchmarks/results/wires.md, with the plot beside it

The same decoder on the standard library's text, the same samples in the same order, by the config alone; the learning
rate is the full wire's. Bytes are what a rank sends in the whole run, warm-up and control messages included. It ends
with status 1 where no wire reaches a target.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import partita
from benchmarks._common import RESULTS, Report, parser
from partita.train.data import load_corpus
from partita.train.decoder import Decoder, DecoderShape
from partita.train.job import DataSection

FULL = "full"
# (How many times fewer bytes than the full wire, and how far above its held-out loss.)
TARGETS = ((5.0, 1.01), (12.0, 1.02))


@dataclass(frozen=True)
class Task:
    """Sizes: samples of a rank's step, steps, and how many of the samples held out are measured."""

    shape: DecoderShape
    length: int = 128
    batch: int = 4
    steps: int = 3000
    held_out: int = 256
    lr: float = 2e-3


TASK = Task(DecoderShape(layers=4, width=128, heads=4, kv_heads=4, ffn_width=512))
SHORT = replace(TASK, shape=DecoderShape(2, 96, 4, 4, 256), length=64, steps=480, held_out=512)
QUICK = replace(TASK, shape=DecoderShape(2, 32, 4, 4, 64), length=64, steps=30, held_out=16)


def wires(task: Task) -> dict[str, dict[str, Any]]:
    """The sections of the config that make each."""

    def both(codec: str, warm_up: float = 0.0) -> dict[str, Any]:
        steps = {"warmup_steps": int(warm_up * task.steps)} if warm_up else {}
        return {"zero": {"stage": 1}, "communication": {"gradients": codec, "parameters": codec, **steps}}

    def onebit(stage: int, codec: str, warm_up: float, name: str = "onebit_adam") -> dict[str, Any]:
        parameters = {"parameters": codec} if stage else {}
        communication = {"gradients": codec, **parameters, "warmup_steps": int(warm_up * task.steps)}
        return {"zero": {"stage": stage}, "communication": communication, "optimizer": {"name": name}}

    def apart(codec: str, every: int) -> dict[str, Any]:
        return {"zero": {"stage": 1}, "communication": {"every": every, "replicas": 4, "gradients": codec}}

    def carrier(share: float, codec: str, warm_up: float, start: str) -> dict[str, Any]:
        made = onebit(1, codec, warm_up)
        return {**made, "communication": {**made["communication"], "carrier": share, "warmup": start}}

    low_rank = {"gradients": "low_rank", "low_rank": 4, "warmup_steps": int(0.05 * task.steps)}
    return {
        FULL: {"zero": {"stage": 1}},
        "int8 both ways": both("int8"),
        "int4 both ways": both("int4"),
        "ternary both ways": both("ternary"),
        "ternary both ways after 5 %": both("ternary", 0.05),
        "ternary both ways after 15 %": both("ternary", 0.15),
        "ternary + carrier after 15 %, 8-bit start": carrier(0.9, "ternary", 0.15, "int8"),
        "ternary + carrier after 5 %, 8-bit start": carrier(0.9, "ternary", 0.05, "int8"),
        "control: ternary, frozen and capped, after 15 %, 8-bit start": carrier(0.0, "ternary", 0.15, "int8"),
        "control: ternary, frozen and capped, after 5 %, 8-bit start": carrier(0.0, "ternary", 0.05, "int8"),
        "control: full, frozen and capped after 15 %": carrier(0.0, "full", 0.15, "full"),
        "control: full, frozen and capped after 5 %": carrier(0.0, "full", 0.05, "full"),
        "2bit both ways after 5 %": both("2bit", 0.05),
        "topk both ways after 5 %": both("topk", 0.05),
        "onebit_adam, signs after 15 %": onebit(0, "onebit", 0.15),
        "onebit_adam, signs after 5 %": onebit(0, "onebit", 0.05),
        "onebit_adam, ternary after 5 %": onebit(0, "ternary", 0.05),
        "onebit_adam at stage 1, ternary after 5 %": onebit(1, "ternary", 0.05),
        "onebit_lamb, signs after 15 %": onebit(0, "onebit", 0.15, "onebit_lamb"),
        "zeroone_adam, signs": {"zero": {"stage": 0}, "optimizer": {"name": "zeroone_adam"}},
        "low rank 4 after 5 %": {"zero": {"stage": 0}, "communication": low_rank},
        "local steps, 10": apart("full", 10),
        "local steps, 10, int4": apart("int4", 10),
        "local steps, 30, ternary": apart("ternary", 30),
    }


# Of the short form, and of the quick one.
IN_SHORT = (
    *(FULL, "int8 both ways", "int4 both ways", "ternary both ways after 5 %", "onebit_adam, signs after 15 %"),
    *("ternary both ways after 15 %", "ternary + carrier after 15 %, 8-bit start"),
    *("control: ternary, frozen and capped, after 15 %, 8-bit start", "control: full, frozen and capped after 15 %"),
    *("onebit_lamb, signs after 15 %",),
    *("zeroone_adam, signs", "low rank 4 after 5 %"),
    *("local steps, 10", "local steps, 10, int4", "local steps, 30, ternary"),
)
IN_QUICK = (FULL, "int4 both ways", "onebit_adam at stage 1, ternary after 5 %", "local steps, 10, int4")


@dataclass(frozen=True)
class Learned:
    """Nats per byte on samples that were not trained on, and megabytes that a rank has sent."""

    loss: float
    megabytes: float


def main() -> int:
    made = parser("What is learned over wires that carry fewer bytes", (4,))
    made.add_argument("--seeds", type=int, default=2, help="number of runs of each")
    made.add_argument("--steps", type=int, help="of each run")
    made.add_argument("--short", action="store_true", help="a small model, one seed, fewer wires")
    options = made.parse_args()
    is_small = options.quick or options.short
    task = QUICK if options.quick else SHORT if options.short else TASK
    task = replace(task, steps=options.steps or task.steps)
    num_seeds = 1 if is_small else options.seeds
    chosen = options.only or (IN_QUICK if options.quick else IN_SHORT if options.short else tuple(wires(task)))
    report = Report("Wires that carry fewer bytes, short" if options.short else "Wires that carry fewer bytes")
    report.begin()
    report.write(_TEXT.format(ranks=options.ranks[0], seeds=num_seeds, **asdict(task)))
    if options.short:
        report.write()
        report.write(_SHORT)
    report.write()
    found = dict[str, list[Learned]]()
    header = ["wire", "held-out loss", "x full", "of each seed", "MB sent", "times fewer bytes"]
    names = dict.fromkeys([FULL, *chosen])
    report.table(header, _rows(found, task, names, options.ranks[0], range(num_seeds)))
    if not is_small:
        for fewer, above in TARGETS:
            held = any(_fewer(found, name) >= fewer and _above(found, name) <= above for name in found)
            report.expect(held, f"a wire of {fewer:g} times fewer bytes within {above - 1:.0%} of the full one's loss")
    name = "wires_short" if options.short else "wires"
    if options.save:
        plot(RESULTS / f"{name}.png", found)
    return report.end(options.save, name)


_TEXT = """Nats per byte on samples that were not trained on, means over {seeds} seeds, after {steps} steps of
{ranks} ranks x {batch} samples of {length} bytes; AdamW (or 1-bit Adam), cosine schedule, clipped to 1, fp32. *MB
sent*: what a rank sends in the whole run. *local steps, 10*: each rank by itself, exchanging every 10 steps."""

_SHORT = """The short form: a model of two blocks, one seed and few steps, of which 15 % are warm-up where there is one.
Gaps are wider than at the end of training, and differences of 1 % are noise; what it shows is the order."""


def _rows(
    found: dict[str, list[Learned]], task: Task, names: Mapping[str, None], num_ranks: int, seeds: range
) -> Iterator[list[str]]:
    for name in names:
        found[name] = [learn(task, name, num_ranks, seed) for seed in seeds]
        losses = [one.loss for one in found[name]]
        yield [
            *(name, f"{statistics.mean(losses):.4f}", f"{_above(found, name):.3f}"),
            *(" ".join(f"{loss:.4f}" for loss in losses), f"{found[name][0].megabytes:.1f}"),
            f"{_fewer(found, name):.1f}",
        ]


def _above(found: Mapping[str, list[Learned]], name: str) -> float:
    """A wire's held-out loss over the full one's."""
    mine, full = (statistics.mean(one.loss for one in found[wire]) for wire in (name, FULL))
    return mine / full


def _fewer(found: Mapping[str, list[Learned]], name: str) -> float:
    return found[FULL][0].megabytes / found[name][0].megabytes


def plot(path: Path, found: Mapping[str, list[Learned]]) -> None:
    """Held-out loss over bytes, a point for each seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for name, runs in found.items():
        axes.plot([one.megabytes for one in runs], [one.loss for one in runs], "o", label=name)
    axes.set_xscale("log")
    axes.set_xlabel("MB that a rank sends in the whole run")
    axes.set_ylabel("held-out loss (nats per byte)")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=7)
    figure.savefig(path)


def learn(task: Task, name: str, num_ranks: int, seed: int) -> Learned:
    """Train on ``num_ranks`` processes of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "learned.json")
        given = json.dumps([asdict(task), name, seed, str(result)])
        ranks = []
        for rank in range(num_ranks):
            places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
            own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, **places}
            command = [sys.executable, "-c", "from benchmarks.wires import run_rank; run_rank()", given]
            ranks.append(subprocess.Popen(command, env=os.environ | {key: str(value) for key, value in own.items()}))
        ended = [process.wait() for process in ranks]
        if any(ended):
            raise RuntimeError(f"{name}: a rank failed")
        learned = Learned(**json.loads(result.read_text()))
    print(f"  {name}, seed {seed}: {learned.loss:.4f}, {learned.megabytes:.1f} MB", file=sys.stderr, flush=True)
    return learned


def run_rank() -> None:
    """One rank of one run, as the command line says."""
    sizes, name, seed, result = json.loads(sys.argv[1])
    task = Task(DecoderShape(**sizes.pop("shape")), **sizes)
    corpus = load_corpus(DataSection(sequence=task.length))
    torch.manual_seed(seed)
    own = wires(task)[name]
    config = {
        **own,
        "optimizer": {"lr": task.lr, "weight_decay": 0.1, **own.get("optimizer", {})},
        "schedule": {"name": "cosine", "warmup_steps": min(40, task.steps // 4), "total_steps": task.steps},
        "clip_grad_norm": 1.0,
    }
    config["schedule"]["min_ratio"] = 0.1
    with partita.initialize(Decoder(task.shape), config) as engine:
        for step in range(task.steps):
            place = (seed * task.steps + step) * engine.mesh.num_ranks + engine.mesh.rank
            engine.backward(loss_of(engine, stretch(corpus.train, task.length, task.batch, place)))
            engine.step()
        sent = engine.traffic_report().sent_bytes()
        batches = range(task.held_out // task.batch)
        with torch.no_grad():
            losses = [loss_of(engine, stretch(corpus.held_out, task.length, task.batch, b)).item() for b in batches]
        if engine.mesh.rank == 0:
            Path(result).write_text(json.dumps(asdict(Learned(statistics.mean(losses), sent / 1e6))))


def stretch(text: Tensor, length: int, batch: int, place: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets [batch, length], drawn by a number."""
    starts = torch.randint(len(text) - length, (batch, 1), generator=torch.Generator().manual_seed(place))
    tokens = text[starts + torch.arange(length + 1)].long()
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


if __name__ == "__main__":
    sys.exit(main())
