"""The pickled index of other libraries' checkpoints: only names that torch.distributed.checkpoint uses are allowed."""

import builtins
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from partita import PartitaError
from partita.checkpoint.backend import Chunk, StoredTensor
from partita.checkpoint.format.manifest import MANIFEST, METADATA, with_checksum
from partita.checkpoint.format.stored import StoredFiles, open_stored
from partita.checkpoint.format.system import checksum
from partita.table.box import Box

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flatten", [False, True])
def test_what_torch_writes_is_read(flatten: bool, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    states = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flatten))
    others = {str(dtype): torch.zeros(2, 0, 3).to(dtype) for dtype in DTYPES}
    dcp.save({"model": model.state_dict(), "optim": states, "o": others, "n": [1, "a"]}, checkpoint_id=tmp_path)
    stored = open_stored(tmp_path)
    assert torch.equal(stored.value("model.weight"), model.weight)
    assert stored.value("n") == [1, "a"]
    for dtype in DTYPES:
        assert (stored.tensors[f"o.{dtype}"].dtype, stored.value(f"o.{dtype}").shape) == (dtype, (2, 0, 3))
    assert len(stored.tensors) == 2 + 6 + len(DTYPES)


@dataclass
class Calls:
    """An object that is pickled as a function call."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, self.arguments


HARMFUL: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "system": (os.system, ("touch ran",), r"posix\.system"),
    "eval": (builtins.eval, ("open('ran', 'w')",), r"builtins\.eval"),
    "load": (torch.load, ("ran",), r"torch\.serialization\.load"),
    "getattr": (getattr, ("a", "upper"), r"builtins\.getattr"),
}


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside an index"])
@pytest.mark.parametrize("name", HARMFUL)
def test_nothing_else_is_called(name: str, inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function, arguments, named = HARMFUL[name]
    monkeypatch.chdir(tmp_path)
    call: Any = Calls(function, arguments)
    (tmp_path / METADATA).write_bytes(pickle.dumps(Metadata({}, planner_data=call) if inside else call))
    with pytest.raises(PartitaError, match=rf"/\.metadata' names '{named}', which .* does not write"):
        open_stored(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [METADATA]


def test_attributes_are_not_looked_up(tmp_path: Path) -> None:
    """Names with dots, which would reach other modules through an allowed one, are refused."""
    (tmp_path / METADATA).write_bytes(b"\x80\x04\x8c\x05torch\x8c\tos.system\x93.")
    with pytest.raises(PartitaError, match=r"names 'torch\.os\.system'"):
        open_stored(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"abc", pickle.dumps({"a": 1}), pickle.dumps(Metadata({}, storage_data=[1]))], ids=range(4)
)
def test_an_index_that_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / METADATA).write_bytes(content)
    with pytest.raises(PartitaError, match=r"/\.metadata' (is damaged|holds a dict: expected an index)"):
        open_stored(tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["../out.distcp", "/out.distcp", "a/../../out.distcp"])
def test_files_outside_the_folder_are_not_read(name: str, tmp_path: Path) -> None:
    dcp.save({"model": nn.Linear(2, 2).state_dict()}, checkpoint_id=tmp_path)
    index = pickle.loads((tmp_path / METADATA).read_bytes())
    for place in index.storage_data.values():
        place.relative_path = name
    (tmp_path / METADATA).write_bytes(pickle.dumps(index))
    with pytest.raises(PartitaError, match=f"names '{name}', which is outside the folder"):
        open_stored(tmp_path)


PLACES = ("ctorch.distributed.checkpoint.metadata\nMetadata\n", "cpathlib\nPosixPath\n", "ctorch\nSize\n")


@pytest.mark.parametrize("place", PLACES)
def test_classes_of_the_process_stay_as_they_are(place: str, tmp_path: Path) -> None:
    """Reading an index leaves classes unchanged, although a pickle can set attributes of the classes that it names."""
    (tmp_path / METADATA).write_bytes(b"\x80\x04" + place.encode() + b"N}\x8c\x05addedK\x01s\x86b.")
    with pytest.raises(PartitaError, match="is damaged|holds a"):
        open_stored(tmp_path)
    assert not any(hasattr(owner, "added") for owner in (Metadata, Path, torch.Size))


def test_files_of_the_same_name_in_two_folders(tmp_path: Path) -> None:
    stored, values = StoredFiles(tmp_path), [torch.full((4,), float(number)) for number in range(2)]
    for number, value in enumerate(values):
        (tmp_path / str(number)).mkdir()
        torch.save(value, path := tmp_path / str(number) / "same.distcp")
        chunk = Chunk(str(number), Box((0,), (4,)), f"{number}/same.distcp", 0, path.stat().st_size)
        stored.tensors[str(number)] = StoredTensor((4,), torch.float32, [chunk])
    with stored.read(list(stored.chunks())) as tensors:
        assert [next(tensors).tolist() for _ in values] == [value.tolist() for value in values]


TABLE: dict[str, Any] = {
    "file": "f",
    "num_bytes": 8,
    "records": [
        {"key": "a", "at": [0, 8, 0], "checksum": "", "shape": [2], "dtype": "float32", "box": [[0], [2]]},
    ],
}
FORGED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no tables": ({"tables": None}, {}, "manifest.json' is damaged"),
    "aliases of nothing": ({"aliases": {"none": ["b"]}}, {}, "manifest.json' is damaged"),
    "record without a key": ({}, {"records": [{}]}, "manifest.json' is damaged"),
    "file outside": ({}, {"file": "../f"}, "names '../f', which is outside the folder"),
    "absolute file": ({}, {"file": "/dev/zero"}, "names '/dev/zero', which is outside the folder"),
}


@pytest.mark.parametrize("name", FORGED)
def test_manifests_of_another_kind(name: str, tmp_path: Path) -> None:
    changed, table, said = FORGED[name]
    content = json.dumps(TABLE | table).encode()
    (tmp_path / "t.json").write_bytes(content)
    manifest = {"format": 1, "tables": {"t.json": checksum(content)}, "aliases": {}} | changed
    (tmp_path / MANIFEST).write_bytes(with_checksum(manifest))
    with pytest.raises(PartitaError, match=said):
        open_stored(tmp_path)
