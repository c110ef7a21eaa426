"""Diagrams computed with the package: states by stage, meshes, pipeline schedules, the timeline of a step."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._drawing import BLUE, GRAY, GREEN, INK, ORANGE, PURPLE, RED, SKY, Axes, figure, save
from partita.parallel.pipeline.schedule import Shape, Work, make_schedule
from partita.parallel.pipeline.schedule_cost import simulate, spans
from partita.prediction.given_config import estimate_config
from partita.prediction.machine import machine_named
from partita.prediction.model_source import read_source
from partita.table.residence import Residence
from partita.table.state_plan import preset

NUM_RANKS = 4
EMPTY = "#C8C8C8"
STATES = (("parameters", 2, BLUE), ("gradients", 2, ORANGE), ("optimizer states", 12, GREEN))  # bytes per parameter
FORMULAS = ("16P", "4P + 12P/N", "2P + 14P/N", "16P/N")


def stages(path: Path) -> None:
    """Draw the states that each of four ranks stores at stages 0 to 3."""
    from matplotlib.patches import Patch, Rectangle

    num_ranks = NUM_RANKS
    drawing, panels = figure(3.4, 4, sharey=True)
    total = sum(size for _, size, _ in STATES)
    for stage, axes in enumerate(panels):
        for rank in range(num_ranks):
            top = 0.0
            for index, (_, size, color) in enumerate(STATES):
                sharded = stage >= len(STATES) - index
                height = size / num_ranks if sharded else size
                start = top + rank * height if sharded else top
                axes.add_patch(Rectangle((rank, top), 0.8, size, facecolor="none", edgecolor=EMPTY, linewidth=0.8))
                axes.add_patch(Rectangle((rank, start), 0.8, height, facecolor=color))
                top += size
            axes.text(rank + 0.4, total + 0.3, str(rank), ha="center", va="top", fontsize=9)
        axes.set_xlim(-0.1, num_ranks)
        axes.set_ylim(total + 1.2, 0)
        axes.set_title(f"stage {stage}\n{FORMULAS[stage]}", fontsize=11)
        axes.axis("off")
    drawing.suptitle(
        "Bytes per rank: 16-bit training with Adam, P parameters, N ranks (here 4)", fontsize=11, x=0.01, ha="left"
    )
    handles = [Patch(color=color, label=f"{name} ({size}P)") for name, size, color in STATES]
    handles.append(Patch(facecolor="none", edgecolor=EMPTY, label="stored by another rank"))
    drawing.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9.5, handlelength=1.2)
    save(drawing, path)


PHASES = ("between\nsteps", "forward and\nbackward", "between\nmicro-batches", "optimizer\nstep")


def stage_phases(stage: int, path: Path) -> None:
    """Draw the part of each state that each of four ranks stores in each phase of a step, at one stage."""
    row = preset(("ddp", "zero1", "zero2", "zero3")[stage])
    states: dict[str, tuple[str, Sequence[Residence | None]]] = {
        "parameters": (BLUE, (row.param_stored, row.param_compute, row.param_stored, row.param_stored)),
        "gradients": (ORANGE, (None, row.grad_arrival, row.grad_between, row.grad_step)),
        "optimizer\nstates": (GREEN, (row.master,) * 4),
    }
    drawing, axes = figure(3.4)
    for line, (state, (color, residences)) in enumerate(states.items()):
        axes.text(-0.25, line * 1.5 + 0.45, state, ha="right", va="center")
        for column, residence in enumerate(residences):
            left = column * 5.2
            _ranks(axes, left, line * 1.5, color, residence)
            is_gathered = state == "parameters" and residence is row.param_compute and row.param_stored.shard_axes
            note = "full, one unit at a time" if is_gathered else _noted(residence)
            axes.text(left + 2, line * 1.5 + 1.14, note, ha="center", va="center", fontsize=9)
    for column, phase in enumerate(PHASES):
        axes.text(column * 5.2 + 2, -0.15, phase, ha="center", va="bottom")
    axes.set_xlim(-3.6, 3 * 5.2 + 4.4)
    axes.set_ylim(3 * 1.5, -0.75)
    axes.axis("off")
    axes.set_title(f"Stage {stage}, four ranks", fontsize=11, loc="left")
    save(drawing, path)


def _ranks(axes: Axes, left: float, top: float, color: str, residence: Residence | None) -> None:
    """Draw one state on four ranks: a box per rank, filled where the rank stores the state."""
    from matplotlib.patches import Rectangle

    for rank in range(NUM_RANKS):
        x = left + rank
        axes.add_patch(Rectangle((x, top), 0.85, 0.9, facecolor="none", edgecolor=EMPTY, linewidth=0.8))
        if residence is None:
            continue
        height = 0.9 / NUM_RANKS if residence.shard_axes else 0.9
        start = top + rank * height if residence.shard_axes else top
        alpha = 0.45 if residence.partial_axes else 1
        axes.add_patch(Rectangle((x, start), 0.85, height, facecolor=color, alpha=alpha))


def _noted(residence: Residence | None) -> str:
    if residence is None:
        return "none"
    if residence.partial_axes:
        return "full, local sums"
    return "shard" if residence.shard_axes else "full"


def mesh(path: Path) -> None:
    """Draw the mesh of 32 ranks: 4 pipeline stages x 2 data replicas x 4 tensor ranks."""
    from matplotlib.patches import FancyBboxPatch, Rectangle

    pipeline, data, tensor = 4, 2, 4
    drawing, axes = figure(3.7)
    for replica in range(data):
        left = replica * (pipeline * 1.35 + 0.9)
        axes.text(left + pipeline * 1.35 / 2 - 0.2, -0.75, f"data {replica}: its own samples", ha="center", color=RED)
        for stage in range(pipeline):
            x = left + stage * 1.35
            axes.add_patch(
                FancyBboxPatch(
                    (x - 0.08, -0.1), 1.06, tensor + 0.1, boxstyle="round,pad=0.04", facecolor="#EAF4FB", edgecolor=BLUE
                )
            )
            axes.text(x + 0.45, tensor + 0.42, f"stage {stage}", ha="center", fontsize=9, color=GREEN)
            for part in range(tensor):
                rank = (stage * data + replica) * tensor + part
                axes.add_patch(Rectangle((x, part), 0.9, 0.86, facecolor=SKY, edgecolor="white"))
                axes.text(x + 0.45, part + 0.45, str(rank), ha="center", va="center")
            if stage + 1 < pipeline:
                arrow = {"arrowstyle": "->", "color": GREEN, "linewidth": 1.6}
                axes.annotate("", (x + 1.27, tensor / 2), (x + 1.0, tensor / 2), arrowprops=arrow)
    middle = pipeline * 1.35 + 0.45
    arrow = {"arrowstyle": "<->", "color": RED, "linewidth": 1.6}
    axes.annotate("", (middle + 0.4, 1.5), (middle - 0.75, 1.5), arrowprops=arrow)
    notes = (
        ("tensor: ranks of one box split every layer and sum activations", BLUE),
        ("pipeline: activations pass from stage to stage", GREEN),
        ("data: replicas sum gradients; ZeRO shards the states over them", RED),
    )
    for line, (note, color) in enumerate(notes):
        axes.text(0, tensor + 1.15 + 0.58 * line, note, color=color, fontsize=10)
    axes.set_xlim(-0.2, 2 * pipeline * 1.35 + 0.8)
    axes.set_ylim(tensor + 2.6, -1.1)
    axes.axis("off")
    axes.set_title("32 ranks: parallel: {pipeline: 4, tensor: 4}, data follows as 2", fontsize=11, loc="left")
    save(drawing, path)


WORK = {
    Work.FORWARD: ("forward", SKY),
    Work.BACKWARD: ("backward", BLUE),
    Work.WEIGHTS: ("weight gradients", ORANGE),
}


def schedules(path: Path) -> None:
    """Draw the four pipeline schedules on four ranks, with the times of the simulation."""
    from matplotlib.patches import Patch

    drawing, panels = figure(5.6, 1, rows=4, sharex=True)
    for axes, name in zip(panels, ("gpipe", "1f1b", "interleaved", "zero_bubble"), strict=True):
        schedule = make_schedule(name, Shape(NUM_RANKS, 8, 2 if name == "interleaved" else 1))
        for rank, row in enumerate(spans(schedule)):
            for work, (_, color) in WORK.items():
                bars = [(start, stop - start) for action, start, stop in row if action.work is work]
                axes.broken_barh(bars, (rank + 0.08, 0.84), facecolor=color, edgecolor="white", linewidth=0.8)
        axes.set_ylim(NUM_RANKS, 0)
        axes.set_yticks([rank + 0.5 for rank in range(NUM_RANKS)], [str(rank) for rank in range(NUM_RANKS)], fontsize=9)
        axes.tick_params(left=False)
        axes.spines[["top", "right", "left"]].set_visible(False)
        cost = simulate(schedule)
        kept = cost.max_kept_forwards[0] / schedule.shape.chunks
        title = f"{name}: ranks idle {cost.bubble:.0%} of the time; rank 0 stores activations of {kept:g} micro-batches"
        axes.set_title(title, fontsize=10, loc="left")
    panels[-1].set_xlabel("time, in forwards of one micro-batch on one rank; rows are ranks")
    handles = [Patch(color=color, label=label) for label, color in WORK.values()]
    drawing.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9.5, handlelength=1.2)
    save(drawing, path)


# The step of `timeline`: the optimizer states of a model with few layers are on the host, so every resource has work.
TIMED_MODEL, TIMED_TOKENS, TIMED_RANKS, TIMED_MACHINE = "layers=4,hidden=4096,family=llama,vocab=32000", 4096, 8, "h100"
TIMED_CONFIG = {"zero": {"stage": 3, "offload": {"optimizer": "host"}}, "batch": {"micro": 4}}
JOBS = {
    "forward": SKY,
    "backward": BLUE,
    "gather": ORANGE,
    "reduce": RED,
    "copy": PURPLE,
    "update": GREEN,
}


def timeline(path: Path) -> None:
    """Draw the trace file that a prediction writes for Perfetto: a step of eight GPUs, with a row per resource."""
    estimate = estimate_config(read_source(TIMED_MODEL, TIMED_TOKENS), TIMED_CONFIG, TIMED_RANKS, "cuda")
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "step.trace.json"
        estimate.write_trace(trace, machine_named(TIMED_MACHINE))
        draw_trace(json.loads(trace.read_text())["traceEvents"], path)


def draw_trace(events: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the events of a trace file with one row per thread. Waits are left empty."""
    from matplotlib.patches import Patch

    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    drawing, axes = figure(2.8)
    for line, (thread, name) in enumerate(names.items()):
        axes.text(-0.01, line + 0.5, name, ha="right", va="center", transform=axes.get_yaxis_transform())
        for job, color in JOBS.items():
            bars = [
                (event["ts"] / 1e3, event["dur"] / 1e3)
                for event in events
                if event.get("tid") == thread and event.get("cat") == job
            ]
            axes.broken_barh(bars, (line + 0.1, 0.8), facecolor=color, edgecolor="white", linewidth=0.6)
    axes.set_ylim(len(names), 0)
    axes.set_yticks([])
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines["left"].set_color(GRAY)
    axes.set_xlabel("time (ms)", color=INK)
    axes.set_title("A predicted step on 8 H100, stage 3, optimizer states on the host", fontsize=11, loc="left")
    handles = [Patch(color=color, label=job) for job, color in JOBS.items()]
    drawing.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=9.5, handlelength=1.2)
    save(drawing, path)
