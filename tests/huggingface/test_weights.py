"""Exports that fail, follow each other, or find other files in their folder; and the choice of files to read."""

import contextlib
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from partita import PartitaError
from partita.huggingface import export as export_module
from partita.huggingface.export import WeightsWriter
from partita.huggingface.weights import INDEX, SINGLE, Weights

NAMES = ("a", "b", "c", "d")


def export(folder: Path, value: float, *, file_bytes: int) -> None:
    with WeightsWriter(folder, file_bytes) as writer:
        for name in NAMES:
            writer.add(name, torch.full((8,), value))
        writer.finish()
    if writer.problem is not None:
        raise PartitaError(writer.problem)


def values(folder: Path) -> set[float]:
    weights = Weights(folder)
    assert weights.find(NAMES) == "a"
    return {weights.read(name)[0].item() for name in NAMES}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


SINGLE_FILE, FOUR_FILES, TWO_FILES = 1000, 40, 80
WAYS = [(one, other) for one in (SINGLE_FILE, FOUR_FILES) for other in (SINGLE_FILE, FOUR_FILES, TWO_FILES)]


@pytest.mark.parametrize(("one", "other"), WAYS)
def test_an_export_replaces_the_one_before_and_nothing_else(one: int, other: int, tmp_path: Path) -> None:
    own = ("model_ema.safetensors", "model-best.safetensors", "model-00009-of-00009.safetensors")
    export(tmp_path, 1.0, file_bytes=one)
    for name in own:
        save_file({"a": torch.zeros(2)}, tmp_path / name)
    export(tmp_path, 2.0, file_bytes=other)
    assert values(tmp_path) == {2.0}
    num = {SINGLE_FILE: 1, FOUR_FILES: 4, TWO_FILES: 2}[other]
    files = [SINGLE] if num == 1 else [f"model-{n:05d}-of-{num:05d}.safetensors" for n in range(1, num + 1)] + [INDEX]
    assert names(tmp_path) == sorted([*files, *own])
    assert all((tmp_path / name).stat().st_mode & 0o444 == 0o444 for name in files)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Killed()], ids=["full", "killed"])
@pytest.mark.parametrize("one", [SINGLE_FILE, FOUR_FILES])
def test_an_export_that_fails_leaves_the_one_before(one: int, error: BaseException, tmp_path: Path) -> None:
    export(tmp_path, 1.0, file_bytes=one)
    before, num_saved = names(tmp_path), 0

    def save(*args: Any, **kwargs: Any) -> None:
        nonlocal num_saved
        num_saved += 1
        if num_saved == 3:
            raise error
        save_file(*args, **kwargs)

    with mock.patch.object(export_module, "save_file", save), pytest.raises((PartitaError, Killed)):
        export(tmp_path, 2.0, file_bytes=FOUR_FILES)
    assert names(tmp_path) == before
    assert values(tmp_path) == {1.0}


@pytest.mark.parametrize("num_renames", range(6))
@pytest.mark.parametrize(("one", "other"), WAYS)
def test_an_export_that_is_killed_at_its_end_mixes_nothing(
    one: int, other: int, num_renames: int, tmp_path: Path
) -> None:
    """After a kill at any rename, one of the two exports is read, or neither."""
    export(tmp_path, 1.0, file_bytes=one)
    real, num_done = Path.rename, 0

    def rename(path: Path, target: Path) -> Path:
        nonlocal num_done
        if num_done == num_renames:
            raise Killed
        num_done += 1
        return real(path, target)

    with mock.patch.object(Path, "rename", rename), contextlib.suppress(Killed):
        export(tmp_path, 2.0, file_bytes=other)
    if {SINGLE, INDEX}.isdisjoint(names(tmp_path)):
        assert one == other == FOUR_FILES  # both exports have the same file names
        with pytest.raises(PartitaError, match=r"4 safetensors files \('model-00001-of-00004.safetensors'"):
            values(tmp_path)
    else:
        assert len(values(tmp_path)) == 1


def test_what_a_killed_export_left_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".export-1234").mkdir()
    (tmp_path / ".export-1234" / "0.safetensors").write_bytes(b"")
    with WeightsWriter(tmp_path) as living:
        living.add("a", torch.zeros(2))
        export(tmp_path, 1.0, file_bytes=SINGLE_FILE)
        assert len(names(tmp_path)) == 2
        living.finish()
    assert names(tmp_path) == [SINGLE]
    assert load_file(tmp_path / SINGLE).keys() == {"a"}


# ------------------------------------------------------------------------------------------------------------- reading


def test_the_only_file_of_a_folder_may_have_any_name(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "given.safetensors")
    assert Weights(tmp_path).shape("a") == (2,)
    save_file({"a": torch.ones(3)}, tmp_path / SINGLE)
    assert Weights(tmp_path).shape("a") == (3,)
    (tmp_path / SINGLE).rename(tmp_path / "other.safetensors")
    with pytest.raises(PartitaError, match=r"2 safetensors files \('given.safetensors', 'other.safetensors', ...\)"):
        Weights(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "other.safetensors"}}))
    assert Weights(tmp_path).shape("a") == (3,)


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", '{"weight_map": {"a": "../given.safetensors"}}', '{"weight_map": {}}']
)
def test_an_index_that_is_none(index: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(PartitaError, match="is not an index of safetensors files"):
        Weights(tmp_path)
