"""The library's log messages are shown on the trainer's console, unless logging is set up."""

import io
import logging
from unittest import mock

from rich.console import Console

from partita.observe.progress import notices_on

LOGGER = logging.getLogger("partita")


def said(message: str, *, level: int = logging.INFO) -> str:
    file = io.StringIO()
    with mock.patch.object(LOGGER, "propagate", False), notices_on(Console(file=file, width=20)):  # pytest has handlers
        LOGGER.log(level, message)
    return file.getvalue()


def test_as_it_is_and_on_one_line() -> None:
    message = "zero: stage 3 [bold]of a line that is longer than the console[/bold]"
    assert said(message) == f"{message}\n"
    assert said("a detail", level=logging.DEBUG) == ""


def test_nothing_is_left() -> None:
    before = list(LOGGER.handlers), LOGGER.level
    said("something")
    assert (list(LOGGER.handlers), LOGGER.level) == before


def test_logging_that_is_set_up_is_left_alone() -> None:
    file = io.StringIO()
    own = logging.StreamHandler(file)
    LOGGER.addHandler(own)
    try:
        assert said("something", level=logging.WARNING) == ""
        assert file.getvalue() == "something\n"
    finally:
        LOGGER.removeHandler(own)
