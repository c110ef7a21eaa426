"""Draw the pictures of the README and the documentation from ``benchmarks/results/``.

``python -m benchmarks.pictures`` draws all of them.

Every chart is read from a saved report, so a picture shows the figures of its report. Terminal pictures replay
recordings, which ``--record`` makes anew. All pictures are SVG files in ``docs/images/``.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _terminal
from benchmarks._common import RESULTS, ROOT

IMAGES = ROOT / "docs" / "images"
MAX_BYTES = 200_000
# Okabe and Ito's palette: the colors differ for every common form of color blindness.
BLUE, SKY, GREEN, ORANGE, RED, PURPLE, GRAY = "#0072B2 #56B4E9 #009E73 #E69F00 #D55E00 #CC79A7 #8C8C8C".split()
INK, PAPER = "#24292F", "#FFFFFF"
# 7 inches at 100 dots per inch: 700 pixels, the width at which every picture must be readable.
DPI = 100
WIDTH = 7.0
Axes = Any  # matplotlib's classes; it is imported only by functions that draw

Row = dict[str, str]


def rows(report: str, *, with_columns: Sequence[str]) -> list[Row]:
    """Return the rows of every table of a saved report that has these columns, as mappings from column to cell.

    Args:
        report: a file name in ``benchmarks/results/``.
        with_columns: column headings that identify the table.
    """
    found: list[Row] = []
    columns: list[str] | None = None
    for line in (RESULTS / report).read_text().splitlines():
        if not line.startswith("|"):
            columns = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if columns is None:
            columns = cells
        elif set(with_columns) <= set(columns) and not set(line) <= set("|-: "):
            found.append(dict(zip(columns, cells, strict=True)))
    if not found:
        raise SystemExit(f"{report} has no table with the columns {', '.join(with_columns)}")
    return found


def _figure(height: float, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(
        {
            "font.family": "DejaVu Sans",
            "font.size": 11,
            "text.color": INK,
            "axes.labelcolor": INK,
            "axes.edgecolor": GRAY,
            "xtick.color": INK,
            "ytick.color": INK,
            "svg.hashsalt": "partita",
        }
    )
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained", facecolor=PAPER)
    return figure, figure.subplots(1, columns, **options)


def _bars(axes: Axes, labels: Sequence[str], values: Sequence[float], colors: Sequence[str], text: str) -> None:
    """Draw horizontal bars with their values, the first on top."""
    places = range(len(labels))[::-1]
    axes.barh(places, values, color=colors, height=0.7)
    for place, value in zip(places, values, strict=True):
        axes.text(
            value,
            place,
            f" {text.format(value)}",
            va="center",
            ha="left",
            bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.8},
        )
    axes.set_yticks(places, labels)
    axes.set_xlim(0, max(values) * 1.18)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)


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
    figure, axes = _figure(2.9)
    _bars(axes, list(labels.values()), [found[mode] for mode in labels], [GRAY, GRAY, SKY, BLUE, GREEN], "{:.2f} GB")
    axes.set_title("Peak memory per rank: 200M parameters, fp32, AdamW, 4 CPU ranks", fontsize=11, loc="left")
    axes.set_xlabel("resident memory above the imports (GB); smaller is better")
    _save(figure, path)


def step_time(path: Path) -> None:
    """Draw the time of a step on 2 and 4 ranks by ZeRO stage, and of DDP and FSDP2."""
    table = rows("step_time.md", with_columns=["ms a step", "ratio"])
    modes = {
        "FSDP2": "PyTorch FSDP2",
        "DDP": "PyTorch DDP",
        "partita 1": "partita, stage 1",
        "partita 2": "partita, stage 2",
        "partita 3": "partita, stage 3",
        "partita 3, kept": "partita, stage 3, kept",
    }
    figure, panels = _figure(3.1, 2, sharey=True)
    for axes, ranks in zip(panels, ("2", "4"), strict=True):
        found = {row["mode"]: float(row["ratio"]) for row in table if row["ranks"] == ranks}
        colors = [GRAY, GRAY, SKY, BLUE, GREEN, ORANGE]
        _bars(axes, list(modes.values()), [found[mode] for mode in modes], colors, "{:.2f}")
        axes.axvline(1, color=INK, linewidth=0.8, linestyle=":")
        axes.set_title(f"{ranks} ranks", fontsize=11, loc="left")
    figure.suptitle(
        "Time of a step, 25M parameters, in units of DDP's: smaller is better", fontsize=11, x=0.01, ha="left"
    )
    _save(figure, path)


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
    figure, axes = _figure(4.0)
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
    _save(figure, path)


STATES = (("parameters", 2, BLUE), ("gradients", 2, ORANGE), ("optimizer states", 12, GREEN))  # bytes per parameter
FORMULAS = ("16P", "4P + 12P/N", "2P + 14P/N", "16P/N")


def stages(path: Path) -> None:
    """Draw the states that each of four ranks stores at stages 0 to 3."""
    from matplotlib.patches import Patch, Rectangle

    num_ranks = 4
    figure, panels = _figure(3.4, 4, sharey=True)
    total = sum(size for _, size, _ in STATES)
    for stage, axes in enumerate(panels):
        for rank in range(num_ranks):
            top = 0.0
            for index, (_, size, color) in enumerate(STATES):
                sharded = stage >= len(STATES) - index
                height = size / num_ranks if sharded else size
                start = top + rank * height if sharded else top
                axes.add_patch(Rectangle((rank, top), 0.8, size, facecolor="none", edgecolor="#C8C8C8", linewidth=0.8))
                axes.add_patch(Rectangle((rank, start), 0.8, height, facecolor=color))
                top += size
            axes.text(rank + 0.4, total + 0.3, str(rank), ha="center", va="top", fontsize=9)
        axes.set_xlim(-0.1, num_ranks)
        axes.set_ylim(total + 1.2, 0)
        axes.set_title(f"stage {stage}\n{FORMULAS[stage]}", fontsize=11)
        axes.axis("off")
    figure.suptitle(
        "Bytes per rank: 16-bit training with Adam, P parameters, N ranks (here 4)", fontsize=11, x=0.01, ha="left"
    )
    handles = [Patch(color=color, label=f"{name} ({size}P)") for name, size, color in STATES]
    handles.append(Patch(facecolor="none", edgecolor="#C8C8C8", label="stored by another rank"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9.5, handlelength=1.2)
    _save(figure, path)


def mesh(path: Path) -> None:
    """Draw the mesh of 32 ranks: 4 pipeline stages x 2 data replicas x 4 tensor ranks."""
    from matplotlib.patches import FancyBboxPatch, Rectangle

    pipeline, data, tensor = 4, 2, 4
    figure, axes = _figure(3.7)
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
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    """Write the figure as SVG. Letters are drawn as paths, so its description repeats every text for readers."""
    from matplotlib.text import Text

    texts = dict.fromkeys(text.get_text().strip() for text in figure.findobj(Text))
    description = "; ".join(" ".join(text.split()) for text in texts if text)
    metadata = {"Date": None, "Creator": None, "Title": path.stem, "Description": description}
    figure.savefig(path, format="svg", metadata=metadata)


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
    "stages": stages,
    "compression": compression,
    "mesh": mesh,
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
