"""What the library says is shown on the trainer's console, unless logging is set up."""

import io
import logging

import pytest
from rich.console import Console

from partita.observe.notices import notices_on


@pytest.fixture(autouse=True)
def no_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest has set logging up."""
    monkeypatch.setattr(logging.getLogger("partita"), "propagate", False)


def said(message: str, *, level: int = logging.INFO) -> str:
    file = io.StringIO()
    with notices_on(Console(file=file, width=20)):
        logging.getLogger("partita").log(level, message)
    return file.getvalue()


def test_as_it_is_and_on_one_line() -> None:
    message = "zero: stage 3 [bold]of a line that is longer than the console[/bold]"
    assert said(message) == f"{message}\n"
    assert said("a detail", level=logging.DEBUG) == ""


def test_nothing_is_left() -> None:
    logger = logging.getLogger("partita")
    before = list(logger.handlers), logger.level
    said("something")
    assert (list(logger.handlers), logger.level) == before


def test_logging_that_is_set_up_is_left_alone() -> None:
    logger, file = logging.getLogger("partita"), io.StringIO()
    own = logging.StreamHandler(file)
    logger.addHandler(own)
    try:
        assert said("something", level=logging.WARNING) == ""
        assert file.getvalue() == "something\n"
    finally:
        logger.removeHandler(own)
