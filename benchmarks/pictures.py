"""Draw the pictures of the README and the documentation from ``benchmarks/results/``.

``python -m benchmarks.pictures`` draws all of them.

Every chart is drawn from a saved report and shows its figures. Terminal pictures replay recordings; ``--record`` makes
new ones. All pictures are SVG files in ``docs/images/``.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import _diagrams, _terminal
from benchmarks._common import RESULTS, ROOT
from benchmarks._drawing import BLUE, GRAY, GREEN, INK, ORANGE, PURPLE, RED, SKY, bars, figure, rows, save

IMAGES = ROOT / "docs" / "images"
MAX_BYTES = 200_000


def memory(path: Path) -> None:
    """Draw the peak resident memory per rank by ZeRO stage, and of DDP and FSDP2."""
    found = {row["mode"]: float(row["resident MB"]) / 1000 for row in rows("memory.md", with_columns=["resident MB"])}
    labels = {
        "DDP": "PyTorch DDP",
        "FSDP2": "PyTorch FSDP2",
        "partita 1": "partita, stage 1",
        "partita 2": "partita, stage 2",
        "partita 3": "partita, stage 3",
    }
    drawing, axes = figure(2.9)
    bars(axes, list(labels.values()), [found[mode] for mode in labels], [GRAY, GRAY, SKY, BLUE, GREEN], "{:.2f} GB")
    axes.set_title("Peak memory per rank: 200M parameters, fp32, AdamW, 4 CPU ranks", fontsize=11, loc="left")
    axes.set_xlabel("resident memory above the imports (GB); smaller is better")
    save(drawing, path)


def step_time(path: Path) -> None:
    """Draw the time of a step on 2 and 4 ranks by ZeRO stage, and of DDP and FSDP2."""
    table = rows("step_time.md", with_columns=["ms per step", "ratio"])
    modes = {
        "FSDP2": "PyTorch FSDP2",
        "DDP": "PyTorch DDP",
        "partita 1": "partita, stage 1",
        "partita 2": "partita, stage 2",
        "partita 3": "partita, stage 3",
        "partita 3, kept": "partita, stage 3, kept",
    }
    drawing, panels = figure(3.1, 2, sharey=True)
    for axes, ranks in zip(panels, ("2", "4"), strict=True):
        found = {row["mode"]: float(row["ratio"]) for row in table if row["ranks"] == ranks}
        colors = [GRAY, GRAY, SKY, BLUE, GREEN, ORANGE]
        bars(axes, list(modes.values()), [found[mode] for mode in modes], colors, "{:.2f}")
        axes.axvline(1, color=INK, linewidth=0.8, linestyle=":")
        axes.set_title(f"{ranks} ranks", fontsize=11, loc="left")
    drawing.suptitle(
        "Time of a step, 25M parameters, in units of DDP's: smaller is better", fontsize=11, x=0.01, ha="left"
    )
    save(drawing, path)


def compression(path: Path) -> None:
    """Draw held-out loss against bytes sent, by kind of compression."""
    table = rows("wires.md", with_columns=["scheme", "x full", "times fewer bytes", "MB sent"])
    table = table[: next(i for i, row in enumerate(table) if i and row["scheme"] == "full")]  # the 1,200-step study
    kinds = {  # the kinds of the study, each with a pattern of its schemes
        "uncompressed": ("full", GRAY, "D"),
        "int8, int4": (r"int[48] both ways", BLUE, "o"),
        "ternary, 2-bit": (r"(ternary|2bit) both ways.*", GREEN, "s"),
        "1-bit Adam": (r"onebit_adam, signs.*", ORANGE, "^"),
        "low rank (PowerSGD)": (r"low rank.*", PURPLE, "v"),
        "local steps (DiLoCo)": (r"local steps.*momentum 0.5", RED, "P"),
    }
    drawing, axes = figure(4.0)
    for label, (pattern, color, marker) in kinds.items():
        found = [row for row in table if re.fullmatch(pattern, row["scheme"])]
        fewer, loss = zip(
            *((float(row["times fewer bytes"]), float(row["held-out loss"])) for row in found), strict=True
        )
        axes.scatter(fewer, loss, s=60, color=color, marker=marker, label=label, zorder=3)
    axes.set_xscale("log")
    ticks = [1, 2, 5, 10, 20, 50, 100, 200]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("times fewer bytes sent than fp32")
    axes.set_ylabel("held-out loss (nats per byte)")
    axes.set_title("Loss against bytes: the model of make train, 1,200 steps, 4 ranks", fontsize=11, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    save(drawing, path)


def longest_sequence(path: Path) -> None:
    """Draw the longest sequence that trains in 4 GB, by what forward stores."""
    found = rows("longest_sequence.md", with_columns=["kept of the forward", "longest"])
    labels = {
        "PyTorch": "PyTorch",
        "+ recomputed": "partita, blocks recomputed",
        "+ tiled loss and feed-forward": "+ tiled loss and feed-forward",
        "+ sparse attention": "+ block-sparse attention",
    }
    longest = {row["kept of the forward"]: int(row["longest"].removeprefix(">= ")) for row in found}
    values = [longest[mode] for mode in labels]
    drawing, axes = figure(2.6)
    bars(axes, list(labels.values()), values, [GRAY, SKY, BLUE, GREEN], "{:,}")
    axes.set_title("Longest sequence that trains in 4 GB, one CPU process", fontsize=11, loc="left")
    axes.set_xlabel("positions (larger is better);\nlonger sequences were not tried in the last two modes")
    save(drawing, path)


def offload(path: Path) -> None:
    """Draw the device memory and the speed of 6.4 billion parameters on one GPU, by encoding and tier."""
    labels = {
        "none": "all on the device",
        "lean, none": "lean states",
        "optimizer on host": "optimizer states on the host",
        "lean, everything on host": "lean states, all on the host",
    }
    found = {row["mode"]: row for row in rows("gpu_model_tflops_7B.md", with_columns=["model-TFLOP/s"])}
    drawing, panels = figure(2.8, 2, sharey=True)
    memory_gib = [float(found[mode]["GiB device + host"].split(" + ")[0]) for mode in labels]
    speed = [float(found[mode]["model-TFLOP/s"]) for mode in labels]
    colors = [GRAY, SKY, BLUE, GREEN]
    bars(panels[0], list(labels.values()), memory_gib, colors, "{:.1f}")
    bars(panels[1], list(labels.values()), speed, colors, "{:.0f}")
    panels[0].set_title("device memory (GiB)", fontsize=11, loc="left")
    panels[1].set_title("model-TFLOP/s", fontsize=11, loc="left")
    drawing.suptitle("6.4 billion parameters on one H200, 16,384 tokens per step", fontsize=11, x=0.01, ha="left")
    save(drawing, path)


def loss(path: Path) -> None:
    """Draw the losses that ``make train`` printed in the recording of its terminal."""
    printed = _terminal.printed(_terminal.load(RESULTS / "terminal" / "train.cast"))
    held_out = {
        int(step): float(loss) for step, loss in re.findall(r"step +(\d+)/\d+ +held-out loss ([\d.]+)", printed)
    }
    means = dict[float, int]()  # by printed mean, the first step that shows it: it is shown until the next one
    for step, mean in re.findall(r"step +(\d+)/\d+ [^\r\n]*? loss ([\d.]+) ", printed):
        means.setdefault(float(mean), int(step))
    drawing, axes = figure(3.4)
    axes.plot(list(means.values()), list(means), color=SKY, label="training, mean of 10 steps")
    axes.plot(list(held_out), list(held_out.values()), color=BLUE, marker="o", label="held out")
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title("make train: a small language model, two processes, ZeRO stage 3", fontsize=11, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    save(drawing, path)


def plan(path: Path) -> None:
    """Draw the terminal after ``partita plan``."""
    path.write_text(_terminal.picture(_terminal.load(RESULTS / "terminal" / "plan.cast")))


def train(path: Path) -> None:
    """Draw the terminal during ``make train``."""
    path.write_text(_terminal.picture(_terminal.load(RESULTS / "terminal" / "train.cast")))


RECORDINGS = {
    "plan": (
        ["partita", "plan", "llama-3-8b", "--gpus", "8", "--gpu", "h100"],
        "partita plan llama-3-8b --gpus 8 --gpu h100",
    ),
    "train": (["make", "--silent", "train"], "make train"),
}
PICTURES: dict[str, Callable[[Path], None]] = {
    "memory": memory,
    "step_time": step_time,
    "stages": _diagrams.stages,
    **{f"stage_{stage}": partial(_diagrams.stage_phases, stage) for stage in range(4)},
    "compression": compression,
    "mesh": _diagrams.mesh,
    "schedules": _diagrams.schedules,
    "timeline": _diagrams.timeline,
    "longest_sequence": longest_sequence,
    "offload": offload,
    "loss": loss,
    "plan": plan,
    "train": train,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=list(PICTURES), help="pictures to draw")
    parser.add_argument(
        "--record", nargs="*", choices=RECORDINGS, default=[], help="run these commands anew and record them"
    )
    parser.add_argument("--quick", action="store_true", help="draw into a temporary folder")
    options = parser.parse_args()
    for name in options.record:
        command, shown = RECORDINGS[name]
        _terminal.record(command, shown, RESULTS / "terminal" / f"{name}.cast")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if options.quick else IMAGES
        folder.mkdir(exist_ok=True)
        for name in options.only:
            path = folder / f"{name}.svg"
            PICTURES[name](path)
            num_bytes = path.stat().st_size
            print(f"{path.name}: {num_bytes / 1000:.0f} KB")
            if num_bytes >= MAX_BYTES:
                print(f"{path} is larger than {MAX_BYTES / 1000:.0f} KB", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
