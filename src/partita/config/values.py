"""Types of configuration values, each with the spellings that it accepts, and the base class of sections.

YAML 1.1 reads ``1e-3`` as text, and users write ``"8"`` and ``1e8`` for integers. Numeric text is therefore read as a
number, and an integral float as an integer. A boolean is never a number.
"""

import numbers
import os
import re
from collections.abc import Mapping
from math import isfinite
from typing import Annotated, Literal, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, model_validator

from partita.errors import ConfigError

_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")
_NUMBER = re.compile(r"[+-]?([0-9]{1,400}(\.[0-9]{0,400})?|\.[0-9]{1,400})([eE][+-]?[0-9]{1,9})?")
_SIZE = re.compile(r"([0-9.eE+]+) ?([kKmMgGtT][iI]?)?[bB]")
_LARGEST_COUNT = 2**31 - 1
_LARGEST_SIZE = 2**63 - 1


def as_number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("a truth value is not a number")
    if isinstance(value, str):
        text = value.strip()
        if _INTEGER.fullmatch(text):
            return int(text)
        return float(text) if _NUMBER.fullmatch(text) else value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError as error:
            raise ValueError("too large for a float") from error
    return value


def as_integer(value: object) -> object:
    number = as_number(value)
    return int(number) if isinstance(number, float) and number.is_integer() else number


def as_size(value: object) -> object:
    """Return bytes from a number or from text with a unit: 1.1 GiB is rounded to the nearest byte."""
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return as_integer(value)
    amount = as_number(match[1])
    prefix = (match[2] or "").lower()
    if not isinstance(amount, int | float):
        raise ValueError("not a number of bytes")
    base = 1024 if prefix.endswith("i") else 1000
    size = amount * base ** ("", "k", "m", "g", "t").index(prefix[:1])
    return round(size) if prefix and isfinite(size) else as_integer(size)


def _path(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def as_tuple(value: object) -> object:
    """Convert a list (YAML has no tuples) to a tuple."""
    return tuple(value) if isinstance(value, list) else value


def as_pairs(value: object) -> object:
    """Return a mapping as a tuple of its pairs."""
    return tuple(value.items()) if isinstance(value, Mapping) else value


def _windows(value: object) -> object:
    """Return one number, or a list of them, as a tuple."""
    return as_tuple(value if isinstance(value, list | tuple) or value is None else [value])


def _rows(value: object) -> object:
    """Convert rows that are lists of digits to text."""
    if not isinstance(value, list | tuple):
        return value
    return tuple("".join(map(_figure, row)) if isinstance(row, list | tuple) else row for row in value)


def _figure(value: object) -> str:
    number = as_integer(value)
    if number not in (0, 1):
        raise ValueError("neither 0 nor 1")
    return str(number)


Flag = Annotated[bool, Strict()]
Count = Annotated[int, Strict(), Field(ge=1, le=_LARGEST_COUNT), BeforeValidator(as_integer)]
CountOrZero = Annotated[int, Strict(), Field(ge=0, le=_LARGEST_COUNT), BeforeValidator(as_integer)]
_WrittenBytes = Annotated[int, Field(ge=0, le=_LARGEST_SIZE)] | Annotated[str, Field(pattern=rf"^{_SIZE.pattern}$")]
Bytes = Annotated[
    int,
    Strict(),
    Field(ge=0, le=_LARGEST_SIZE, examples=["64MiB"]),
    BeforeValidator(as_size, json_schema_input_type=_WrittenBytes),
]
Positive = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False), BeforeValidator(as_number)]
NotNegative = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False), BeforeValidator(as_number)]
Share = Annotated[float, Strict(), Field(ge=0, lt=1, allow_inf_nan=False), BeforeValidator(as_number)]
Ratio = Annotated[float, Strict(), Field(ge=0, le=1, allow_inf_nan=False), BeforeValidator(as_number)]
_Number = Annotated[float, Strict(), Field(allow_inf_nan=False), BeforeValidator(as_number)]
Coefficients = Annotated[tuple[_Number, _Number, _Number], Strict(), BeforeValidator(as_tuple)]
SharePair = Annotated[tuple[Share, Share], Strict(), BeforeValidator(as_tuple)]
Text = Annotated[str, Strict(), Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], Strict(), BeforeValidator(as_tuple)]
SomeTexts = Annotated[tuple[Text, ...], Strict(), Field(min_length=1), BeforeValidator(as_tuple)]
_WrittenCount = Annotated[int, Field(ge=1, le=_LARGEST_COUNT)]
_WrittenWindows = _WrittenCount | Annotated[list[_WrittenCount], Field(min_length=1)]
Windows = Annotated[
    tuple[Count, ...],
    Strict(),
    Field(min_length=1),
    BeforeValidator(_windows, json_schema_input_type=_WrittenWindows),
]
Rows = Annotated[
    tuple[Text, ...], Strict(), BeforeValidator(_rows, json_schema_input_type=list[str | list[Literal[0, 1]]])
]
# A class by its location: module:class.
ClassPath = Annotated[
    str,
    Strict(),
    Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$", examples=["module:class"]),
]
PathText = Annotated[str, Strict(), Field(min_length=1), BeforeValidator(_path)]

Auto = Literal["auto"]


class Section(BaseModel):
    """A frozen group of keys. An empty section (``zero:`` without a value) has all defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _empty_is_defaults(cls, data: object) -> object:
        return {} if data is None else data

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise ConfigError(
            f"a configuration is immutable: '{name}' cannot be set to {value!r}; create another one with "
            "partita.config.load.load_config(config, overrides=['section.key=value'])"
        )
