"""Tables, errors and exit codes of commands."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from partita.errors import PartitaError

USER_ERROR, FAILURE, INTERRUPTED = 2, 1, 130

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")]


def show_table(console: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print rows of a bold name and a text."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def show_error(console: Console, message: str) -> None:
    """Print an error in red, without interpreting markup (brackets) in the message."""
    console.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)


def show_notice(console: Console, message: str) -> None:
    """Print a note in yellow, without interpreting markup in the message."""
    console.print(Text.assemble(("note: ", "bold yellow"), message), soft_wrap=True)


@contextmanager
def user_errors(prefix: str = "") -> Iterator[None]:
    """Show a :class:`PartitaError` of the block as one message, and exit with :data:`USER_ERROR`."""
    try:
        yield
    except PartitaError as error:
        show_error(Console(stderr=True), prefixed(prefix, str(error)))
        raise typer.Exit(USER_ERROR) from None


def prefixed(prefix: str, message: str) -> str:
    """Prepend a prefix to a message that does not already begin with it."""
    return prefix + message.removeprefix(prefix)
