"""``partita convert``: converts configs and checkpoints of other libraries into partita's formats."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from partita.checkpoint.external.convert import open_external
from partita.checkpoint.external.source import write
from partita.cli.console import Overwrite, busy, check_new, show_notice, user_errors
from partita.config.external_format import convert_external
from partita.config.write import write_text
from partita.huggingface.trained import read_model

convert = typer.Typer(name="convert", no_args_is_help=True, help="Convert configs and checkpoints of other libraries.")


@convert.command(name="config")
def config_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A ds_config.json, or accelerate's YAML.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The file to write.", show_default="shown")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Number of data-parallel ranks.")] = 1,
    per_node: Annotated[int | None, typer.Option(min=1, help="Ranks per node.", show_default="all")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write another library's config as partita's YAML, with a comment about each key."""
    with user_errors():
        check_new([out] if out else [], overwrite)
        text = convert_external(file, processes, per_node).as_yaml()
        if out is None:
            typer.echo(text, nl=False)
            return
        write_text(out, text)
    typer.echo(f"{out}: for partita.initialize(model, '{out}')")


@convert.command(name="checkpoint")
def checkpoint_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint of DeepSpeed, FSDP or the Trainer.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write step-N into.")],
) -> None:
    """Convert a checkpoint for engine.load: universal ones of DeepSpeed, and those of FSDP and the Trainer."""
    with user_errors(), busy(f"converting {folder}"):
        foreign = open_external(folder, read_model)
        path = write(foreign, out)
    for notice in foreign.notices:
        show_notice(Console(stderr=True), notice)
    num = len(foreign.tensors())
    typer.echo(f"{path}: {num} tensors of {foreign.library} after {foreign.step} steps, for engine.load('{out}')")
