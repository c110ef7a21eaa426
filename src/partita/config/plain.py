"""Plain data: nested dicts with text keys, lists and scalars, bounded in depth and in number of values.

Whatever a configuration is made of (YAML, JSON, the user's mapping) becomes plain before anything else looks at it. The
bounds end cyclic and exponentially shared structures, which a few bytes of YAML aliases can describe.
"""

import re
import reprlib
from collections.abc import Mapping
from typing import Any, cast

from pydantic import BaseModel

from partita.errors import ConfigError

MAX_DEPTH = 16
MAX_VALUES = 10_000
_SIMPLE_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,79}")


class Budget:
    """Counts the values of one configuration and their depth.

    Raises:
        ConfigError: more than :data:`MAX_VALUES` values, or nested deeper than :data:`MAX_DEPTH`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._left = MAX_VALUES

    def spend(self, depth: int) -> None:
        self._left -= 1
        if depth > MAX_DEPTH:
            raise ConfigError(
                f"{self._name}: nested deeper than {MAX_DEPTH} levels, or containing itself; a configuration has 3"
            )
        if self._left < 0:
            raise ConfigError(f"{self._name}: more than {MAX_VALUES} values; a configuration has about 40")


def plain(data: Mapping[Any, object], name: str) -> dict[str, object]:
    """A copy of ``data`` in which every mapping and model is a dict with text keys; ``name`` calls it in errors.

    Raises:
        ConfigError: a key is not printable text, or the data is too large or too deep.
    """
    return cast("dict[str, object]", _plain(data, (), name, Budget(name)))


def _plain(value: object, path: tuple[str, ...], name: str, budget: Budget) -> object:
    budget.spend(len(path))
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        copy: dict[str, object] = {}
        for key, item in value.items():
            check_key(key, path, name)
            copy[str(key)] = _plain(item, (*path, str(key)), name, budget)
        return copy
    if isinstance(value, (list, tuple)):
        return [_plain(item, (*path, str(i)), name, budget) for i, item in enumerate(value)]
    return value


def check_key(key: object, path: tuple[str, ...], where: str) -> None:
    """Refuses a key that is not printable text; ``path`` is the section that holds it."""
    if not isinstance(key, str) or not key.isprintable():
        section = f"in '{dotted(path)}'" if path else "at the top level"
        fix = "remove these characters" if isinstance(key, str) else "put quotes around it"
        raise ConfigError(f"{where}: keys must be printable text; got the key {shown(key)} {section}; {fix}")


def dotted(path: tuple[str, ...]) -> str:
    """``zero.offload.path``; a part that is no simple word is quoted."""
    return ".".join(part if _SIMPLE_KEY.fullmatch(part) else shown(part) for part in path)


def shown(value: object) -> str:
    """A value as a short text for messages, with YAML's words for None and truth values."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        return _short.repr(list(value) if isinstance(value, tuple) else value)
    except Exception:  # a repr is the user's code: it may raise anything, and Python's own does for very long integers
        return f"<{type(value).__name__}>"


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlevel = 3
