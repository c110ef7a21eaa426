"""Writing the files that commands are asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from partita.errors import ConfigError

YAML = (".yaml", ".yml")


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Name the file and a remedy in an error of the system while the block writes it.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be written: {error.strerror}; name another file") from None


def write_text(path: str | Path, text: str) -> None:
    """Write a text file.

    Raises:
        ConfigError: the file cannot be written.
    """
    with writing(path):
        Path(path).write_text(text, encoding="utf-8")


def write_yaml(path: str | Path, content: object) -> None:
    """Write plain values as YAML, in their order.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_text(path, yaml.safe_dump(content, sort_keys=False))
