"""Reads of ``param.data``, which :class:`~partita.sharding.written.Written` has to know of.

The tensor that ``param.data`` returns shares the parameter's memory and has a version counter of its own, so no counter
shows what is written through it. The attribute is replaced on ``nn.Parameter`` by one that reports each read to the
parameter's engine, if it has one; it behaves as before in every other respect.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_DATA = torch._C.TensorBase.data

Report = Callable[[nn.Parameter, Tensor], object]


class _ReportedData:
    """The attribute ``data``, which calls ``report`` with the parameter and the tensor that is returned."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def __get__(self, param: nn.Parameter | None, owner: type[Any]) -> Any:
        if param is None:
            return _DATA
        values = _DATA.__get__(param)  # type: ignore[attr-defined]
        self._report(param, values)
        return values

    def __set__(self, param: nn.Parameter, values: Tensor) -> None:
        _DATA.__set__(param, values)  # type: ignore[attr-defined]


def report_reads(report: Report) -> None:
    """Call ``report`` at every read of a parameter's ``data`` from here on."""
    if not isinstance(nn.Parameter.__dict__.get("data"), _ReportedData):
        setattr(nn.Parameter, "data", _ReportedData(report))  # noqa: B010 - torch declares it as a tensor
