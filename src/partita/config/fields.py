"""The kinds of values that a configuration holds.

YAML 1.1 reads ``1e-3`` as text, and people write ``"8"`` and ``1e8`` for whole numbers: numeric text is a number here,
and an integral float a whole number. A truth value is never a number.
"""

import numbers
import os
import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Strict

_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")
_NUMBER = re.compile(r"[+-]?([0-9]{1,400}(\.[0-9]{0,400})?|\.[0-9]{1,400})([eE][+-]?[0-9]{1,9})?")
_SIZE = re.compile(r"([0-9.eE+]+) ?([kmgt]i?)?b", re.IGNORECASE)
_LARGEST_COUNT = 2**31 - 1
_LARGEST_SIZE = 2**63 - 1


def _number(value: object) -> object:
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


def _whole(value: object) -> object:
    number = _number(value)
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _size(value: object) -> object:
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return _whole(value)
    amount, prefix = _number(match[1]), (match[2] or "").lower()
    if not isinstance(amount, int | float):
        raise ValueError("not a number of bytes")
    base = 1024 if prefix.endswith("i") else 1000
    return _whole(amount * base ** ("", "k", "m", "g", "t").index(prefix[:1]))


def _path(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Flag = Annotated[bool, Strict()]
Count = Annotated[int, Strict(), Field(ge=1, le=_LARGEST_COUNT), BeforeValidator(_whole)]
CountOrZero = Annotated[int, Strict(), Field(ge=0, le=_LARGEST_COUNT), BeforeValidator(_whole)]
Bytes = Annotated[int, Strict(), Field(ge=0, le=_LARGEST_SIZE, examples=["64MiB"]), BeforeValidator(_size)]
Positive = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False), BeforeValidator(_number)]
NotNegative = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False), BeforeValidator(_number)]
Share = Annotated[float, Strict(), Field(ge=0, lt=1, allow_inf_nan=False), BeforeValidator(_number)]
SharePair = Annotated[tuple[Share, Share], Strict(), BeforeValidator(_tuple)]
Text = Annotated[str, Strict(), Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], Strict(), BeforeValidator(_tuple)]
SomeTexts = Annotated[tuple[Text, ...], Strict(), Field(min_length=1), BeforeValidator(_tuple)]
PathText = Annotated[str, Strict(), Field(min_length=1), BeforeValidator(_path)]

Auto = Literal["auto"]
Stage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_whole)]
Tier = Literal["none", "host", "disk", "auto"]
Gradients = Literal["fp32", "bf16", "fp16", "in_backward"]
Compute = Literal["auto", "fp32", "bf16", "fp16"]
