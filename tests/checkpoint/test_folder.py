"""Checkpoints that a folder lists, keeps and removes, with several writers and after interruptions anywhere."""

import itertools
import json
from pathlib import Path
from unittest import mock

import pytest

from partita.checkpoint.format.folder import (
    complete_checkpoints,
    folder_warning,
    next_sequence,
    partial_of,
    publish,
    resolve_checkpoint,
    start_partial,
)
from partita.checkpoint.format.manifest import MANIFEST, SEQUENCE
from partita.checkpoint.format.system import Lock, is_locked
from partita.errors import PartitaError

_tokens = itertools.count()


def begin(folder: Path, step: int) -> Path:
    partial = partial_of(folder, step, f"run-{next(_tokens)}")
    start_partial(partial)
    return partial


def end(partial: Path, step: int, keep: int = 3, *, content: str = "", sequence: bool = True) -> Path:
    number = {SEQUENCE: next_sequence(partial.parent)} if sequence else {}
    (partial / MANIFEST).write_text(json.dumps({"format": 1, **number, "step": step, "content": content}))
    return publish(partial, step, keep)


def save(folder: Path, *steps: int, keep: int = 3, content: str = "", sequence: bool = True) -> None:
    for step in steps:
        end(begin(folder, step), step, keep, content=content, sequence=sequence)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def content_of(checkpoint: Path) -> str:
    return str(json.loads((checkpoint / MANIFEST).read_text())["content"])


# ----------------------------------------------------------------------------------------------- the newest checkpoint


def test_newest_is_what_was_published_last(tmp_path: Path) -> None:
    save(tmp_path, 80, 90, 100, 10, 20)
    assert list(complete_checkpoints(tmp_path)) == [100, 10, 20]
    assert resolve_checkpoint(tmp_path).name == "step-20"
    save(tmp_path, 100)
    assert resolve_checkpoint(tmp_path).name == "step-100"
    assert names(tmp_path) == ["step-10", "step-100", "step-20"]


def test_a_folder_without_a_checkpoint_and_none_are_two_errors(tmp_path: Path) -> None:
    with pytest.raises(PartitaError, match=r"is not a checkpoint, and has no complete one \(step-N\): name the folder"):
        resolve_checkpoint(tmp_path)
    with pytest.raises(PartitaError, match="'.*step-3' does not exist"):
        resolve_checkpoint(tmp_path / "step-3")


@pytest.mark.parametrize("keep", [1, 2])
def test_what_was_just_saved_stays(keep: int, tmp_path: Path) -> None:
    """The checkpoint just published stays, even if its manifest has no sequence number."""
    save(tmp_path, 8, 9)
    manifest = tmp_path / "step-9" / MANIFEST
    partial = begin(tmp_path, 1)
    (partial / MANIFEST).write_text("{}")
    publish(partial, 1, keep)
    assert manifest.exists() == (keep == 2)
    assert (tmp_path / "step-1" / MANIFEST).exists()
    assert len(names(tmp_path)) == keep


def test_checkpoints_without_a_number_are_the_oldest(tmp_path: Path) -> None:
    save(tmp_path, 300, 100, 200, sequence=False)
    assert list(complete_checkpoints(tmp_path)) == [100, 200, 300]
    save(tmp_path, 5)
    assert list(complete_checkpoints(tmp_path)) == [200, 300, 5]


def test_a_damaged_manifest_keeps_its_place(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    manifest = tmp_path / "step-2" / MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:-5] + b"\xff")
    assert resolve_checkpoint(tmp_path).name == "step-2"
    save(tmp_path, 1)
    assert resolve_checkpoint(tmp_path).name == "step-1"


def test_later_steps_are_noticed(tmp_path: Path) -> None:
    assert folder_warning(tmp_path / "new", 1) is None
    save(tmp_path, 8, 9)
    assert folder_warning(tmp_path, 9) is None
    said = folder_warning(tmp_path, 3)
    assert said is not None
    assert "holds later steps (to step-9) than step-3, which is saved now" in said


# -------------------------------------------------------------------------------------------------------- interruptions


class Killed(BaseException):
    pass


@pytest.mark.parametrize("num_renames", range(4))
def test_a_step_that_is_saved_again_is_never_missing(num_renames: int, tmp_path: Path) -> None:
    save(tmp_path, 4, keep=1, content="first")
    partial, real, done = begin(tmp_path, 4), Path.rename, itertools.count()

    def rename(path: Path, target: Path) -> Path:
        if next(done) == num_renames:
            raise Killed
        return real(path, target)

    with mock.patch.object(Path, "rename", rename), pytest.raises(Killed):
        end(partial, 4, keep=1, content="second")
    for _ in range(2):  # right after the kill, and after the next run has begun to save
        (found,) = complete_checkpoints(tmp_path).values()
        assert resolve_checkpoint(tmp_path) == resolve_checkpoint(tmp_path / "step-4") == found
        assert content_of(found) in ("first", "second")
        begin(tmp_path, 5)
    assert content_of(tmp_path / "step-4") in ("first", "second")
    save(tmp_path, 5, keep=1)
    assert names(tmp_path) == ["step-5"]


# ----------------------------------------------------------------------------------------------------- several writers


def test_runs_that_save_one_step_at_the_same_time_do_not_meet(tmp_path: Path) -> None:
    first = begin(tmp_path, 1)
    lock = Lock(first / "__0.lock")
    assert "is being written by another run" in str(folder_warning(tmp_path, 1))
    second = begin(tmp_path, 1)
    assert content_of(end(second, 1, content="second")) == "second"
    assert first.exists()
    assert content_of(end(first, 1, content="first")) == "first"
    lock.release()
    assert names(tmp_path / "step-1") == [MANIFEST]
    assert names(tmp_path) == ["step-1"]


def test_what_dead_runs_left_is_removed(tmp_path: Path) -> None:
    partial = begin(tmp_path, 1)
    lock = Lock(partial / "__0.lock")
    assert is_locked(partial / "__0.lock")
    for name in (".step-7.partial", ".step-7.old", ".step-8.ab12.removed"):  # some from earlier versions
        (tmp_path / name).mkdir()
    begin(tmp_path, 2)
    assert names(tmp_path)[0] == partial.name
    assert len(names(tmp_path)) == 2
    lock.release()
    assert not is_locked(partial / "__0.lock")
    save(tmp_path, 3)
    assert names(tmp_path) == ["step-3"]
