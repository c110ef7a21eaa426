"""``partita simulate``: shows the memory and communication of each rank of a cluster.

It runs the real engine on meta tensors.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from partita.cli.console import STDOUT, Overwrite, busy, check_new, user_errors, write_figures
from partita.cli.plan import DEFAULT_GPU, TRACES
from partita.config.load import load_config
from partita.config.messages import format_bytes
from partita.config.write import YAML
from partita.errors import ConfigError
from partita.memory import accelerator
from partita.prediction.given_config import estimate_config
from partita.prediction.machine import Machine, machine_named, machines
from partita.prediction.model_source import read_source
from partita.prediction.simulate.cluster import RANKS_PER_NODE, Cluster, Simulation
from partita.prediction.simulate.cluster import simulate as run
from partita.prediction.simulate.collective_rows import collective_rows
from partita.prediction.simulate.rank import Collective, RankReport, SimulatedModel
from partita.prediction.simulate.summary import bytes_rows, plain, sequence, state_rows
from partita.prediction.step_cost import StepCost

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The engine's config, a YAML or JSON file.")]
Model = Annotated[
    str,
    typer.Option(
        help="A preset, sizes (layers=24,hidden=2048), a folder or config.json of Hugging Face, or module:function, "
        "which returns (model, batch)."
    ),
]
World = Annotated[int, typer.Option(min=1, help="Number of ranks.")]
Ranks = Annotated[
    list[int] | None,
    typer.Option("--rank", help="A rank to simulate. May be repeated.", show_default="one of each role"),
]
Tokens = Annotated[int | None, typer.Option(help="Tokens per sample.", show_default="the model's, at most 2048")]
Device = Annotated[
    str,
    typer.Option(
        help="Device of each rank: cpu, cuda, ..., or a machine as in partita plan (h100, a file of partita machine)."
    ),
]
PerNode = Annotated[int, typer.Option("--ranks-per-node", min=1, help="Ranks on a node.")]
Figures = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write all figures; - is the standard output.")
]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Write the predicted step for Perfetto (.trace.json or .trace.json.gz), with the collectives of the rank "
        "that stores most.",
    ),
]


def simulate(
    config: ConfigFile,
    model: Model,
    world: World,
    ranks: Ranks = None,
    tokens: Tokens = None,
    device: Device = accelerator.USUAL_KIND,
    ranks_per_node: PerNode = RANKS_PER_NODE,
    figures: Figures = None,
    trace: Trace = None,
    overwrite: Overwrite = False,
) -> None:
    """Show what each rank of a cluster would store and send, without a cluster."""
    with user_errors():
        if trace is not None and not trace.name.endswith(TRACES):
            raise ConfigError(f"--trace {trace}: expected a name that ends in {' or '.join(TRACES)}")
        check_new([file for file in (figures, trace) if file is not None], overwrite)
        settings = load_config(config)
        kind, machine = _computed_on(device)
        if trace is not None and machine is None:
            raise ConfigError(
                f"--trace: --device {device} is not a machine; name one (h100, or a file of partita machine)"
            )
        batch = read_source(model, tokens).batch
        simulated_model = SimulatedModel(
            lambda: read_source(model, tokens).model, lambda samples: batch(samples, accelerator.SIMULATED)
        )
        with busy(f"simulating {model} on {world} ranks"):
            found = run(simulated_model, settings, Cluster(world, kind, ranks_per_node), ranks)
        if figures is not None:
            write_figures(plain(found), figures)
        if trace is not None and machine is not None:
            step_cost = StepCost(machine, world, machine.compute_dtype)
            calls = collective_rows(_fullest(found), found.resolved.mesh, step_cost)
            estimate_config(read_source(model, tokens), settings, world, kind).write_trace(trace, machine, calls)
    if figures != STDOUT:
        show(found, Console())


def _computed_on(device: str) -> tuple[str, Machine | None]:
    """Return the device type, and the machine if one is named; for the default device type, that of DEFAULT_GPU."""
    if device.lower() in machines() or Path(device).suffix in YAML:
        machine = machine_named(device)
        return accelerator.usual_kind(machine.one_memory), machine
    return device, machine_named(DEFAULT_GPU) if device == accelerator.USUAL_KIND else None


def _fullest(found: Simulation) -> RankReport:
    return max(found.ranks, key=lambda rank: max(rank.bytes_by_tier.values(), default=0))


def show(found: Simulation, console: Console) -> None:
    """Print a row for each role, and the memory and collectives of the rank that stores most in one memory."""
    table = _table("rank", "place", right=("device", "host", "disk", "of it activations", "sent in a step"))
    for names, numbers in bytes_rows(found):
        table.add_row(*names, *(format_bytes(num) if num else "" for num in numbers))
    console.print(table)
    most = _fullest(found)
    console.print(f"\n[bold]rank {most.role.rank}[/] ({most.role.coordinates}), at the most:", highlight=False)
    _show_rank(most, console)


def _show_rank(rank: RankReport, console: Console) -> None:
    states = _table("state", "tier", right=("bytes",))
    for (state, tier), num in state_rows(rank):
        states.add_row(state, tier, format_bytes(num))
    console.print(states)
    if not rank.collectives:
        console.print("\nit sends nothing")
        return
    console.print("\nwhat it sends in a step, in this order:")
    calls = _table("times", "collective", "over", "for", right=("bytes",))
    for times, cycle in sequence(rank.collectives):
        for number, call in enumerate(cycle):
            calls.add_row(f"{times} x" if number == 0 else "", *_call(call), format_bytes(call.sent_bytes))
    console.print(calls)


def _call(call: Collective) -> tuple[str, str, str]:
    return call.key.collective, ", ".join(call.key.axes), call.key.purpose


def _table(*left: str, right: tuple[str, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right")
    return table
