"""How a command ends when the user is to be told something."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

from partita.errors import PartitaError

USER_ERROR, FAILURE, INTERRUPTED = 2, 1, 130


def show_error(console: Console, message: str) -> None:
    """The message as it is, after a red word: it may hold any characters, brackets too."""
    console.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)


@contextmanager
def user_errors(prefix: str = "") -> Iterator[None]:
    """Shows a :class:`PartitaError` of the block as one message, and ends the command with :data:`USER_ERROR`."""
    try:
        yield
    except PartitaError as error:
        show_error(Console(stderr=True), prefixed(prefix, str(error)))
        raise typer.Exit(USER_ERROR) from None


def prefixed(prefix: str, message: str) -> str:
    """The message after a prefix that it may begin with already."""
    return prefix + message.removeprefix(prefix)
