"""``partita plan``: predicts memory and speed of a model's training, and writes the config of the best plan."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from partita.cli.console import FAILURE, STDOUT, Overwrite, busy, check_new, show_error, user_errors, write_figures
from partita.config.messages import format_bytes
from partita.config.values import as_size
from partita.config.write import YAML
from partita.errors import ConfigError
from partita.prediction.machine import machine_named
from partita.prediction.measure_machine import measure_machine
from partita.prediction.plan import Plan, format_shortfall
from partita.prediction.plan import plan as make_plan
from partita.prediction.search import Forecast
from partita.table.residence import Tier

TRACES = (".trace.json", ".trace.json.gz")
_BAR = 48
_COLORS = {
    "parameters": "blue",
    "gradients": "cyan",
    "master": "magenta",
    "moments": "red",
    "working": "yellow",
    "activations": "green",
}
_MOST_ROWS = 10
THIS, DEFAULT_GPU = "this", "h100"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A preset (llama-3-70b, gpt-1t, ...), sizes (layers=24,hidden=2048), a folder or config.json of Hugging "
        "Face, or module:function, which returns (model, batch).",
    ),
]
Gpus = Annotated[int, typer.Option(help="Number of GPUs.")]
Gpu = Annotated[
    str,
    typer.Option(
        help="Type of GPU: h200, h100, a100-80, v100-32, ...; a file of partita machine; or this: this machine, "
        "measured with as many ranks."
    ),
]
ThisMachine = Annotated[bool, typer.Option("--this-machine", help="The same as --gpu this.")]
HostMemory = Annotated[
    str | None,
    typer.Option(metavar="BYTES", help="Host memory per node, such as 128GiB.", show_default="the machine's"),
]
Disk = Annotated[
    str | None, typer.Option(metavar="BYTES", help="Disk space per node, such as 2TB.", show_default="the machine's")
]
Network = Annotated[
    str | None,
    typer.Option(metavar="BYTES", help="Network per node and second, such as 1.25GB.", show_default="the machine's"),
]
Tokens = Annotated[int | None, typer.Option(help="Tokens per sample.", show_default="the model's, at most 2048")]
Compress = Annotated[
    bool,
    typer.Option(
        "--compress",
        help="Also consider quantized communication of gradients and parameters (int8, int4, ternary). It is lossy.",
    ),
]
Lean = Annotated[
    bool,
    typer.Option("--lean", help="Also consider states of lower precision where exact ones fit. It is lossy."),
]
Figures = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write all figures; - is the standard output.")
]
Files = Annotated[
    list[Path] | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="Write the config of the best plan (.yaml), or its predicted step for Perfetto (.trace.json). May be "
        "repeated.",
    ),
]


def plan(
    model: Model,
    gpus: Gpus = 1,
    gpu: Gpu = DEFAULT_GPU,
    this_machine: ThisMachine = False,
    host_memory: HostMemory = None,
    disk: Disk = None,
    network: Network = None,
    tokens: Tokens = None,
    compress: Compress = False,
    lean: Lean = False,
    figures: Figures = None,
    files: Files = None,
    overwrite: Overwrite = False,
) -> None:
    """Predict memory and speed of training a model, and find the best plan; exit code 1 if nothing fits."""
    files = files or []
    with user_errors():
        for file in files:
            if not file.name.endswith((*YAML, *TRACES)):
                raise ConfigError(
                    f"--out {file}: expected a name that ends in .yaml (the config) or .trace.json (the predicted step)"
                )
        check_new([*files, *([figures] if figures else [])], overwrite)
        given = {"--host-memory": host_memory, "--disk": disk, "--network": network}
        changed: dict[str, Any] = {
            option[2:].replace("-", "_"): _bytes(option, text) for option, text in given.items() if text is not None
        }
        measured = this_machine or gpu == THIS
        with busy("measuring this machine" if measured else "reading the machine"):
            machine = replace(measure_machine(gpus), **changed) if measured else machine_named(gpu, **changed)
        with busy(f"predicting plans for {model}"):
            found = make_plan(model, gpus=gpus, gpu=machine, tokens=tokens, compress=compress, lean=lean)
        if figures is not None:
            write_figures(found.data(), figures)
        for file in files if found.best is not None else []:
            if file.name.endswith(TRACES):
                found.write_trace(file)
            else:
                found.write(file)
    if figures != STDOUT:
        show(found, Console())
    if found.best is None:
        show_error(Console(stderr=True), found.explain_no_fit())
        raise typer.Exit(FAILURE)


def show(found: Plan, console: Console) -> None:
    """Print the plans as a table, and the memory and config of the best one."""
    params = (
        f"{found.source.num_params / 1e9:.3g}B" if found.source.num_params > 1e8 else f"{found.source.num_params:,}"
    )
    tokens = f" of {found.source.context} tokens" if found.source.context else ""
    console.print(
        f"[bold]{found.source.name}[/]: {params} parameters, on {found.num_gpus} x {found.machine.name}, "
        f"{found.samples} samples{tokens} a step",
        highlight=False,
    )
    console.print(_table(found, found.best_per_state_settings[:_MOST_ROWS]))
    if len(found.best_per_state_settings) > _MOST_ROWS:
        console.print(f"and {len(found.best_per_state_settings) - _MOST_ROWS} more (--json has all)", highlight=False)
    if found.best is None:
        return
    console.print(
        f"\n[bold]{found.best.settings.states.name}[/], predicted for the rank that holds most:", highlight=False
    )
    for line in _bars(found.best):
        console.print(line)
    if found.best.sent:
        along = ", ".join(f"{axes} {format_bytes(num)}" for axes, num in found.best.sent.items())
        console.print(f"predicted to send in a step, along {along}", highlight=False)
    console.print("\n[bold]config[/]")
    console.print(yaml.safe_dump(found.config(), sort_keys=False).rstrip(), highlight=False)


def _table(found: Plan, rows: Sequence[Forecast]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("states", "data x sequence x tensor x pipeline", "micro", "recomputed"):
        table.add_column(name)
    for name in ("GPU", "host", "disk", "predicted step", "tokens/s" if found.source.context else "samples/s"):
        table.add_column(name, justify="right")
    for each in rows:
        settings, used = each.settings, each.by_tier
        mesh = " x ".join(str(settings.mesh.size(axis)) for axis in ("data", "sequence", "tensor", "pipeline"))
        memory = [format_bytes(used[tier]) if used[tier] else "" for tier in Tier]
        if each.time is None:
            ends = f"[red]{format_shortfall(each)}[/]", ""
        else:
            rate = found.samples * (found.source.context or 1) / each.time.total_s
            ends = f"{each.time.total_s:.3g} s", f"{rate:,.0f}"
        shown = "" if settings.checkpoint == "none" else settings.checkpoint
        shown += f", inputs on {settings.inputs}" * (settings.inputs != "none")
        table.add_row(settings.states.name, mesh, f"{settings.micro} x {settings.accumulate}", shown, *memory, *ends)
    return table


def _bars(forecast: Forecast) -> list[Text]:
    """Return a bar for each memory in use; its full length is the usable memory."""
    lines = list[Text]()
    for tier in Tier:
        parts = Counter({what: num for (what, where), num in forecast.held.items() if where == tier.value})
        if not parts:
            continue
        most = max(forecast.budget.of(tier), sum(parts.values()), 1)
        line, filled = Text(f"{'GPU' if tier is Tier.DEVICE else tier.value:<7}"), 0
        for what, num in parts.items():
            cells = round(_BAR * num / most)
            line.append("█" * cells, style=_COLORS.get(what, "white"))
            filled += cells
        line.append("░" * max(0, _BAR - filled), style="dim")
        line.append(f"  {format_bytes(sum(parts.values()))} of {format_bytes(forecast.budget.of(tier))}: ")
        for at, (what, num) in enumerate(parts.most_common()):
            line.append(", " * bool(at) + f"{what} {format_bytes(num)}", style=_COLORS.get(what, "white"))
        lines.append(line)
    return lines


def _bytes(option: str, text: str) -> int:
    """Parse a size (``128GiB``, ``1.5TB``, ``1e12``) or a rate, which may end in ``/s``."""
    try:
        size = as_size(text.strip().lower().removesuffix("/s").removesuffix("b") + "b")
    except ValueError:
        size = None
    if not isinstance(size, int):
        raise ConfigError(f"{option}: expected bytes such as 128GiB or 1.5TB; got '{text}'")
    return size
