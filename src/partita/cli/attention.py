"""``partita attention``: shows a configuration's attention pattern."""

from pathlib import Path
from typing import Annotated

import typer

from partita.attention.apply import layout_of
from partita.attention.picture import picture
from partita.cli.console import user_errors
from partita.config.load import load_config

attention = typer.Typer(name="attention", no_args_is_help=True, help="Show attention patterns.")


@attention.callback()
def options() -> None:
    """Show attention patterns."""


@attention.command()
def show(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="An engine's config.", show_default="all defaults")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Such as attention.window=1024; repeatable.")
    ] = None,
    length: Annotated[int, typer.Option(min=1, help="Positions of a sample.")] = 4096,
    both: Annotated[bool, typer.Option("--both", help="Bidirectional, if attention.causal is auto.")] = False,
) -> None:
    """Draw a config's attention pattern, and show its cost relative to dense attention."""
    with user_errors():
        settings = load_config(config, overrides or ()).attention
        causal = not both if settings.causal == "auto" else settings.causal
        typer.echo(picture(layout_of(settings, causal), length))
