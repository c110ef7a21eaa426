"""Shared parts of the charts: colors, figures, bars, tables of saved reports, and SVG files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._common import RESULTS

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


def figure(height: float, columns: int = 1, *, rows: int = 1, **options: Any) -> tuple[Any, Any]:
    """Return an empty figure of the documentation's width, and its panels."""
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
    drawing = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained", facecolor=PAPER)
    return drawing, drawing.subplots(rows, columns, **options)


def bars(axes: Axes, labels: Sequence[str], values: Sequence[float], colors: Sequence[str], text: str) -> None:
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


def save(drawing: Any, path: Path) -> None:
    """Write the figure as SVG. Letters are drawn as paths, so its description repeats every text for readers."""
    from matplotlib.text import Text

    texts = dict.fromkeys(text.get_text().strip() for text in drawing.findobj(Text))
    description = "; ".join(" ".join(text.split()) for text in texts if text)
    metadata = {"Date": None, "Creator": None, "Title": path.stem, "Description": description}
    drawing.savefig(path, format="svg", metadata=metadata)
