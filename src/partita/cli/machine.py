"""``partita machine``: measures this machine, and writes a file for ``partita plan --gpu FILE``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from partita.cli.console import Overwrite, busy, check_new, user_errors
from partita.config.messages import format_bytes
from partita.config.write import YAML
from partita.errors import ConfigError
from partita.prediction.machine import BY_FLOPS, Machine, write_machine
from partita.prediction.measure_machine import measure_machine

Ranks = Annotated[
    int,
    typer.Option(min=1, help="Ranks that compute and send at the same time. On a CPU, they divide the cores."),
]
OutFile = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="The file to write (.yaml).")]


def machine(ranks: Ranks = 1, out: OutFile = None, overwrite: Overwrite = False) -> None:
    """Measure this machine: its memory, and the speed of compute, copies and collectives with this many ranks."""
    with user_errors():
        if out is not None and out.suffix not in YAML:  # --gpu recognizes files by this suffix
            raise ConfigError(f"--out {out}: expected a name that ends in .yaml")
        check_new([out] if out else [], overwrite)
        with busy("measuring this machine"):
            found = measure_machine(ranks, out.stem if out else "this machine")
        if out is not None:
            write_machine(found, out)
    show(found, Console())


def show(found: Machine, console: Console) -> None:
    """Print a row for each kind of job: the time of a small one, and the time and rate of the largest."""
    console.print(
        f"[bold]{found.name}[/], {found.source}: memory {format_bytes(found.memory)}, disk {format_bytes(found.disk)} "
        f"at {format_bytes(found.disk_rate)}/s",
        highlight=False,
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("jobs of a rank", "a small one", "the largest", "rate"):
        table.add_column(name, justify="left" if name == "jobs of a rank" else "right")
    for kind, curve in found.curves:
        (_, small_s), (size, large_s) = curve.points[0], curve.points[-1]
        unit = "GFLOP/s" if kind in BY_FLOPS else "GB/s"
        small, large = f"{1e6 * small_s:.3g} us", f"{1e3 * large_s:.3g} ms"
        table.add_row(kind.replace("_", " "), small, large, f"{size / large_s / 1e9:.3g} {unit}")
    console.print(table)
