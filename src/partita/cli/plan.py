"""``partita plan``: predicts memory and speed of a model's training, and writes the config of the best plan."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from partita.cli.console import FAILURE, Overwrite, busy, show_error, user_errors
from partita.config.messages import format_bytes
from partita.config.values import as_size
from partita.errors import ConfigError
from partita.prediction.machine import machine_named
from partita.prediction.measure_machine import measure_machine
from partita.prediction.plan import Plan, format_shortfall
from partita.prediction.plan import plan as make_plan
from partita.prediction.search import Forecast
from partita.table.residence import Tier

TRACES = (".trace.json", ".trace.json.gz")
FIGURES = ".json"  # suffix of files that are overwritten without --overwrite
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
        "measured with as many ranks (also --this-machine)."
    ),
]
NODE_FIGURES = ("--host-memory", "--disk", "--network")
OfNodes = Annotated[
    list[str] | None,
    typer.Option(
        *NODE_FIGURES,
        metavar="BYTES",
        help="Override the machine's figure per node, such as 128GiB; for the network per second, such as 1.25GB.",
    ),
]
Tokens = Annotated[int | None, typer.Option(help="Tokens per sample.", show_default="the model's, at most 2048")]
LOSSY = ("--compress", "--lean")
Lossy = Annotated[
    list[str] | None,
    typer.Option(
        *LOSSY,
        metavar="",
        help="--compress: also consider quantized communication of gradients and parameters (int8, int4, ternary). "
        "--lean: also consider states of lower precision where exact ones fit. Both are lossy.",
    ),
]
Files = Annotated[
    list[str] | None,
    typer.Option(
        "--json",
        "--out",
        metavar="FILE",
        help="Write all figures (.json; - is the standard output), the config of the best plan (.yaml), or its "
        "predicted step for Perfetto (.trace.json).",
    ),
]


class PlanCommand(TyperCommand):
    """A command with ``--this-machine`` for ``--gpu this``, and with the option's name in each figure of the nodes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words, rest = list[str](), iter(args)
        for given in rest:
            option, equals, value = given.partition("=")
            if option in NODE_FIGURES:
                words += [option, *(f"{option}={text}" for text in ([value] if equals else islice(rest, 1)))]
            elif given in LOSSY:
                words += (f"{given}={given}",)
            else:
                words += ("--gpu", THIS) if given == "--this-machine" else (given,)
        return super().parse_args(ctx, words)


def plan(
    model: Model,
    gpus: Gpus = 1,
    gpu: Gpu = DEFAULT_GPU,
    of_nodes: OfNodes = None,
    tokens: Tokens = None,
    lossy: Lossy = None,
    files: Files = None,
    overwrite: Overwrite = False,
) -> None:
    """Predict memory and speed of training a model, and find the best plan; exit code 1 if nothing fits."""
    with user_errors():
        for file in files or ():
            if not (overwrite or file.endswith(FIGURES)) and Path(file).is_file():
                raise ConfigError(f"'{file}' exists already; pass --overwrite to replace it, or name another file")
        given = (figure.split("=", 1) for figure in of_nodes or ())
        figures: dict[str, Any] = {name[2:].replace("-", "_"): _bytes(name, text) for name, text in given}
        with busy("measuring this machine" if gpu == THIS else "reading the machine"):
            machine = replace(measure_machine(gpus), **figures) if gpu == THIS else machine_named(gpu, **figures)
        compress, lean = (option in (lossy or ()) for option in LOSSY)
        with busy(f"predicting plans for {model}"):
            found = make_plan(model, gpus=gpus, gpu=machine, tokens=tokens, compress=compress, lean=lean)
        for file in files or ():
            _write(found, file)
    if "-" not in (files or ()):
        show(found, Console())
    if found.best is None:
        show_error(Console(stderr=True), found.explain_no_fit())
        raise typer.Exit(FAILURE)


def _write(found: Plan, file: str) -> None:
    try:
        if file == "-":
            typer.echo(json.dumps(found.data(), indent=2))
        elif file.endswith(TRACES):
            if found.best is not None:
                found.write_trace(file)
        elif Path(file).suffix in (".yaml", ".yml"):
            if found.best is not None:
                found.write(file)
        else:
            Path(file).write_text(json.dumps(found.data(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"'{file}' cannot be written: {error.strerror}; name another file") from None


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
