"""The ``partita`` command. User errors are shown as one message without a traceback, with exit code 2."""

from typing import Annotated

import typer

from partita.cli.attention import attention
from partita.cli.checkpoint import checkpoint
from partita.cli.console import replace_unprintable
from partita.cli.convert import convert
from partita.cli.doctor import doctor
from partita.cli.evaluate import eval_command
from partita.cli.machine import machine
from partita.cli.plan import PlanCommand, plan
from partita.cli.run import run
from partita.cli.sample import sample
from partita.cli.schema import schema
from partita.cli.simulate import SimulateCommand, simulate
from partita.cli.train import train
from partita.cli.tune import tune

app = typer.Typer(
    name="partita",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="Train PyTorch models that do not fit on one device, by sharding and offloading every training state.",
)
app.command()(train)
app.command(name="eval")(eval_command)
app.command()(sample)
# Arguments after SCRIPT belong to the script.
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command(cls=PlanCommand)(plan)
app.command()(tune)
app.command()(machine)
app.command(cls=SimulateCommand)(simulate)
app.command()(doctor)
app.command()(schema)
app.add_typer(attention)
app.add_typer(checkpoint)
app.add_typer(convert)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("partita"))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Handle the options of the top-level command."""
    replace_unprintable()


if __name__ == "__main__":
    app()
