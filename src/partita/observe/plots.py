"""A plot of a run's losses."""

import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from partita.observe.metrics import HeldOutRow, TrainRow

# The smoothed curve is a mean over about this share of all rows.
_WINDOW = 0.05
_TRAIN_COLOR, _HELD_OUT_COLOR = "#3b6fb6", "#c8452d"


def plot_losses(
    path: Path, train: Sequence[TrainRow], held_out: Sequence[HeldOutRow], title: str, token: str = "byte"
) -> None:
    """Draw training loss (raw and smoothed) and held-out loss over steps into a PNG.

    ``token``: the name of a token. If it is "byte", the right axis shows bits per byte.
    """
    # Imported here, because it takes half a second, which only the rank that draws needs to spend.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), dpi=120, layout="constrained")
    axes = figure.subplots()
    _draw_curves(axes, train, held_out)
    tokens_per_step = train[-1].tokens // train[-1].step if train else 0
    axes.set_title(title)
    axes.set_xlabel(f"optimizer step ({tokens_per_step:,} {token}s each)" if tokens_per_step else "optimizer step")
    axes.set_ylabel(f"loss (nats per {token})")
    if token == "byte":
        nats_per_bit = math.log(2)
        functions = (lambda nats: nats / nats_per_bit, lambda bits: bits * nats_per_bit)
        bits = axes.secondary_yaxis("right", functions=functions)
        bits.set_ylabel("bits per byte")
    axes.grid(alpha=0.25)
    axes.margins(x=0.02)
    axes.spines[["top"]].set_visible(False)
    if train or held_out:
        axes.legend(frameon=False)
    figure.savefig(path)


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the mean of a window around each value. It narrows towards both ends, so that the curve does not lag."""
    half, last = round(_WINDOW * len(values) / 2), len(values) - 1
    sums = list(accumulate(values, initial=0.0))
    widths = [min(half, index, last - index) for index in range(len(values))]
    return [(sums[i + width + 1] - sums[i - width]) / (2 * width + 1) for i, width in enumerate(widths)]


def _draw_curves(axes: Any, train: Sequence[TrainRow], held_out: Sequence[HeldOutRow]) -> None:
    if train:
        steps, losses = [row.step for row in train], [row.loss for row in train]
        axes.plot(steps, losses, color=_TRAIN_COLOR, alpha=0.25, linewidth=1)
        axes.plot(steps, smoothed(losses), color=_TRAIN_COLOR, linewidth=1.8, label="training text, smoothed")
    if held_out:
        steps, losses = [row.step for row in held_out], [row.held_out_loss for row in held_out]
        axes.plot(steps, losses, color=_HELD_OUT_COLOR, marker="o", markersize=4.5, linewidth=1, label="held-out text")
        last = held_out[-1]
        axes.annotate(
            f"{last.held_out_loss:.2f}",
            (last.step, last.held_out_loss),
            textcoords="offset points",
            xytext=(-4, 8),
            ha="right",
            color=_HELD_OUT_COLOR,
        )
