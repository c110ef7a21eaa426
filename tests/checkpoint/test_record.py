"""Values that a checkpoint can store and load, and the bytes of a tensor's record."""

import enum
import io
import re
from collections import Counter, OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from partita import PartitaError
from partita.checkpoint.backend import Chunk
from partita.checkpoint.format.record import frame_of, read_tensor
from partita.checkpoint.format.stored import StoredFiles
from partita.checkpoint.offline import verify
from partita.checkpoint.serializable import object_bytes, read_object, to_serializable


class Color(enum.IntEnum):
    RED = 1


KEPT: dict[str, tuple[Any, Any]] = {
    "nothing": (None, None),
    "numbers of numpy": ([numpy.float64(0.1), numpy.int64(3), numpy.bool_(True)], [0.1, 3, True]),
    "its texts": (numpy.str_("a"), "a"),
    "as keys": ({numpy.int64(3): (1, numpy.float32(1.5))}, {3: (1, 1.5)}),
    "ordered": (OrderedDict(a={numpy.int32(2)}), {"a": {2}}),
    "counted": (Counter([2, 2, 5]), Counter({2: 2, 5: 1})),
    "of torch": ([torch.float32, torch.device("cpu")], [torch.float32, torch.device("cpu")]),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_can_be_read_back(name: str) -> None:
    value, expected = KEPT[name]
    found = read_object(object_bytes(to_serializable(value, "x")))
    assert (found, type(found)) == (expected, type(expected))
    assert [type(item) for item in found or ()] == [type(item) for item in expected or ()]


REFUSED: dict[str, tuple[Any, str]] = {
    "a path": (Path("a"), r"x is of pathlib\.\w+"),
    "inside": ({"a": [1, Path("a")]}, r"x\['a'\]\[1\] is of pathlib\.\w+"),
    "a key": ({Path("a"): 1}, r"a key of x is of pathlib\.\w+"),
    "an array": (numpy.zeros(2), r"x is of numpy\.ndarray"),
    "a date": (numpy.datetime64("2020-01-01"), r"x is of numpy\.datetime64"),
    "a long number": (numpy.longdouble(1), r"x is of numpy\.longdouble"),
    "an enumeration": (Color.RED, r"x is of .*\.Color"),
    "a function": (lambda: 1, r"x is of builtins\.function"),
    "an object": (SimpleNamespace(a=1), r"x is of types\.SimpleNamespace"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot(name: str) -> None:
    value, said = REFUSED[name]
    with pytest.raises(PartitaError, match=rf"{said}, which could not be loaded again: expected numbers, text"):
        to_serializable(value, "x")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("sizes", [(), (3, 2), (0,), (2, 0, 3)])
def test_a_framed_tensor_is_one_that_torch_loads(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    frame, value = frame_of(dtype, sizes), torch.ones(sizes).to(dtype)
    record = bytearray(frame.head + bytes(value.view(-1).view(torch.uint8).tolist()) + frame.tail)
    for found in (torch.load(io.BytesIO(record)), read_tensor(memoryview(record), len(frame.head), dtype, sizes)):
        assert isinstance(found, Tensor)
        assert (found.shape, found.dtype) == (sizes, dtype)
        assert torch.equal(found.float(), value.float())


@pytest.mark.parametrize("record", [object_bytes(Path("a")), object_bytes(1)[:40], b"x"], ids=["class", "cut", "other"])
def test_what_cannot_be_loaded_is_found(record: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(record)
    stored = StoredFiles(tmp_path, values={"scheduler": Chunk("scheduler", None, "file", 0, len(record))})
    said = f"checkpoint: 'scheduler' in '{tmp_path}/file' cannot be loaded"
    assert [problem.startswith(said) for problem in verify(stored)] == [True]
    with pytest.raises(PartitaError, match=re.escape(said)):
        stored.value("scheduler")
