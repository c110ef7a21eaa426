"""``partita convert``: what other libraries wrote, as partita reads it."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from partita.checkpoint.foreign.convert import open_foreign
from partita.checkpoint.foreign.foreign import write
from partita.cli.console import show_notice, user_errors
from partita.huggingface.trained import read_model

convert = typer.Typer(name="convert", no_args_is_help=True, help="Turn what other libraries wrote into partita's.")


@convert.command(name="checkpoint")
def checkpoint_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint of DeepSpeed, FSDP or the Trainer.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write step-N into.")],
) -> None:
    """Write a checkpoint that engine.load reads: DeepSpeed's universal ones, FSDP's, and the Trainer's."""
    with user_errors():
        foreign = open_foreign(folder, read_model)
        path = write(foreign, out)
    for notice in foreign.notices:
        show_notice(Console(stderr=True), notice)
    num = len(foreign.tensors())
    typer.echo(f"{path}: {num} tensors of {foreign.library} after {foreign.step} steps, for engine.load('{out}')")
