"""Tables, errors and exit codes of commands."""

import errno
import io
import json
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from partita.errors import ConfigError, PartitaError

USER_ERROR, FAILURE, INTERRUPTED = 2, 1, 130  # exit codes: of wrong usage, of a failure at run time, of Ctrl-C

# Errors of the system that name neither their cause nor a remedy.
_REMEDIES = {
    errno.EMFILE: "raise this process's limit of open files (ulimit -n)",
    errno.ENFILE: "close files of other processes, or raise the system's limit of open files (fs.file-max)",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOSPC: "free disk space, or name a folder on a larger disk",
    errno.EDQUOT: "free disk space, or name a folder on another disk",
}

STDOUT = "-"  # the name of the standard output among files
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
def busy(message: str) -> Iterator[None]:
    """Show a spinner with a message on standard error while the block runs, if that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(message):
        yield


@contextmanager
def user_errors(prefix: str = "") -> Iterator[None]:
    """Show a :class:`PartitaError` of the block, or an error of :func:`system_errors`, as one message, and exit.

    The exit code is :data:`USER_ERROR` after a :class:`ConfigError`, else :data:`FAILURE`.
    """
    with library_errors(prefix), system_errors():
        yield


@contextmanager
def library_errors(prefix: str = "") -> Iterator[None]:
    """Show a :class:`PartitaError` of the block as one message, and exit as :func:`user_errors` does.

    Errors of a user's script keep their traceback.
    """
    try:
        yield
    except PartitaError as error:
        show_error(Console(stderr=True), prefixed(prefix, str(error)))
        raise typer.Exit(USER_ERROR if isinstance(error, ConfigError) else FAILURE) from None


@contextmanager
def system_errors() -> Iterator[None]:
    """Convert the system's errors about limits (open files, lengths of names, disk space) into errors with a remedy.

    Raises:
        PartitaError: the block reached one of these limits.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        file = "" if error.filename is None else f" ('{error.filename}')"
        raise PartitaError(f"{error.strerror}{file}; {_REMEDIES[error.errno]}") from error


def check_new(files: Iterable[str | Path], overwrite: bool) -> None:
    """Check that a command writes only new files, unless it may ``overwrite`` existing ones. ``-`` is no file.

    Raises:
        ConfigError: one of the files exists.
    """
    for file in files:
        if not overwrite and Path(file).is_file():
            raise ConfigError(f"'{file}' exists already; pass --overwrite to replace it, or name another file")


def write_figures(figures: object, file: str) -> None:
    """Write a command's figures as JSON, to a file or to the standard output.

    Raises:
        ConfigError: the file cannot be written.
    """
    from partita.config.write import write_text  # the program's help needs no config

    text = json.dumps(figures, indent=2)
    if file == STDOUT:
        typer.echo(text)
    else:
        write_text(file, text + "\n")


def show_warnings_in_one_line() -> None:
    """Show the library's warnings without its files and lines. Warnings of other code keep theirs."""
    warnings.formatwarning = _format_warning


_PACKAGE = str(Path(__file__).parents[1])
_format_others = warnings.formatwarning


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    if filename.startswith(_PACKAGE):
        return f"warning: {message}\n"
    return _format_others(message, category, filename, lineno, line)


def replace_unprintable() -> None:
    """Print replacements of characters that the encoding of standard output or error does not have."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def prefixed(prefix: str, message: str) -> str:
    """Prepend a prefix to a message that does not already begin with it."""
    return prefix + message.removeprefix(prefix)
