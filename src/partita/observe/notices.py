"""What the library has to say, shown where the trainer shows its own."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text


class _Handler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(Text(record.getMessage()), soft_wrap=True)


@contextmanager
def notices_on(console: Console) -> Iterator[None]:
    """Print what goes to the logger ``partita`` on a console, unless whoever runs this has set logging up."""
    logger = logging.getLogger("partita")
    if logger.hasHandlers() or logger.level:
        yield
        return
    handler = _Handler(console)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
