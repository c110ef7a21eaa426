"""Failures of offload: the disk, its folder, a process. All ranks end with an error, and none hangs."""

import errno
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import partita
from partita import PartitaError
from partita.huggingface.weights import Weights
from partita.memory.disk import Disk
from partita.sharding import unshard_order
from tests.kit import seeds
from tests.kit.models import Stack, inputs, square_loss
from tests.kit.plans import ON_DISK, ZERO, matrix
from tests.kit.ranks import WorkerError, on_ranks
from tests.kit.training import Recipe, assert_same_bits, rank, train_recipe
from tests.memory.scratch import refuse

TIMEOUT_S = 5.0

Failing = Callable[[], AbstractContextManager[Any]]


def config(folder: str | Path, **more: Any) -> dict[str, Any]:
    zero = {"stage": 3, "offload": {**ON_DISK, "path": str(folder)}}
    return {"zero": zero, "communication": {"timeout_s": TIMEOUT_S}, **more}


def take_steps(engine: partita.Engine, num_steps: int) -> None:
    for step in range(num_steps):
        engine.backward(square_loss(engine, rank(), step))
        assert engine.step().stepped


# ------------------------------------------------------------------------------------------------------- initialization


@contextmanager
def replaced(name: str, raised: OSError) -> Iterator[None]:
    """Replace a system call by one that fails."""
    with mock.patch.object(os, name, side_effect=raised):
        yield


@contextmanager
def small_files() -> Iterator[None]:
    """Limit the size of the files that this process may write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def failure(number: int) -> OSError:
    return OSError(number, os.strerror(number))


FAILING: dict[str, tuple[Failing, str]] = {
    "full": (
        partial(replaced, "posix_fallocate", failure(errno.ENOSPC)),
        r"\(\d+ bytes are free\): reserving \d{5,} bytes failed: No space left on device; free space",
    ),
    "files are limited": (
        small_files,
        r"\(\d+ bytes are free\): reserving \d{5,} bytes failed: File too large; raise the limit of the file size",
    ),
    "not writable": (
        partial(replaced, "open", failure(errno.EACCES)),
        r"creating a scratch file failed: Permission denied; set zero.offload.path to a folder in which",
    ),
}


def fails_at_the_start(name: str, ranks: tuple[int, ...], folder: str) -> str:
    """Initialize with a disk that fails on these ``ranks``, and return the error.

    The model is unchanged afterwards, so that it can be initialized again.
    """
    failing, said = FAILING[name]
    model, before = Stack(2), {}
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(PartitaError, match=said) as caught:
        if rank() in ranks:
            with failing():
                partita.initialize(model, config(folder))
        else:
            partita.initialize(model, config(folder))
    assert list(Path(folder).iterdir()) == []
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with partita.initialize(model, config(folder)) as engine:
        take_steps(engine, 2)
    return str(caught.value)


@matrix(ranks=[(0,), (1,), (0, 1)], name=FAILING)
def test_a_disk_that_refuses_is_an_error_on_every_rank(name: str, ranks: tuple[int, ...], tmp_path: Path) -> None:
    for number, text in enumerate(on_ranks(2, fails_at_the_start, name, ranks, str(tmp_path))):
        assert f"offload to disk, in '{tmp_path}'" in text
        assert text.startswith(f"rank {ranks[0]} of the group") == (number not in ranks)


def wide() -> nn.Module:
    """Return a model whose states, 16 MB, do not fit on a small filesystem."""
    return nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 4))


def does_not_fit(folder: str) -> None:
    said = rf"'{folder}' \(\d+ bytes are free\): reserving \d{{7,}} bytes failed: No space left on device; free space"
    with pytest.raises(PartitaError, match=said):
        partita.initialize(wide(), config(folder))
    with partita.initialize(Stack(1), config(folder)) as engine:
        take_steps(engine, 1)


@pytest.mark.filterwarnings("ignore:.*O_DIRECT")
def test_a_disk_that_is_full_indeed(small_filesystem: Path) -> None:
    on_ranks(2, does_not_fit, str(small_filesystem))


def test_a_filesystem_that_is_read_only(small_filesystem: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_filesystem)], check=True, timeout=60)
    with pytest.raises(PartitaError, match="Read-only file system; set zero.offload.path to a folder on a filesystem"):
        partita.initialize(Stack(1), config(small_filesystem))


def a_full_disk_does_not_end_a_step(folder: str, optimizer: dict[str, Any]) -> None:
    """Check that a disk which fills up after the start ends no step: space for all states is already reserved."""
    with partita.initialize(Stack(3), config(folder, optimizer=optimizer)) as engine:
        with replaced("posix_fallocate", failure(errno.ENOSPC)):
            take_steps(engine, 3)
            engine.state_dict()


@pytest.mark.parametrize("optimizer", [{"name": "adamw"}, {"name": "sgd", "momentum": 0.9}, {"name": "sgd"}])
def test_space_is_taken_at_the_start(optimizer: dict[str, Any], tmp_path: Path) -> None:
    for world in (1, 2):
        on_ranks(world, a_full_disk_does_not_end_a_step, str(tmp_path), {"lr": 0.01, **optimizer})


def cannot_be_read(folder: str, weights: str) -> str:
    """Initialize from weights that rank 0 cannot read, and return the error. Every rank reads its own part."""
    broken = mock.patch.object(Weights, "read", side_effect=PartitaError("the file is damaged"))
    with broken if rank() == 0 else nullcontext(), pytest.raises(PartitaError, match="the file is damaged") as caught:
        partita.initialize(Stack(2), config(folder), weights=weights)
    return str(caught.value)


def test_weights_that_cannot_be_read(tmp_path: Path) -> None:
    weights, folder = tmp_path / "all.safetensors", tmp_path / "states"
    folder.mkdir()
    save_file(Stack(2).state_dict(), weights)
    first, second = on_ranks(2, cannot_be_read, str(folder), str(weights))
    assert first == "the file is damaged"
    assert second.startswith("rank 0 of the group over data failed: PartitaError: the file is damaged")
    assert list(folder.iterdir()) == []


# ------------------------------------------------------------------------------------------------------------- training


def killed_in_a_step(folder: str, call: str) -> None:
    with partita.initialize(Stack(3), config(folder)) as engine:
        take_steps(engine, 2)
        if rank() == 1:
            mock.patch.object(Disk, call, side_effect=lambda *_: os.kill(os.getpid(), signal.SIGKILL)).start()
        take_steps(engine, 3)


def meets_a_rank_that_is_gone() -> None:
    """Train after rank 1 has ended. Gloo refuses at once to send to a process whose end it has seen."""
    with partita.initialize(Stack(3), {"zero": {"stage": 3}}) as engine:
        take_steps(engine, 1)
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)
        take_steps(engine, 1)


def test_a_rank_that_is_gone_before_it_is_sent_to() -> None:
    with pytest.raises(WorkerError, match="rank 1 died") as caught:
        on_ranks(2, meets_a_rank_that_is_gone)
    (other,) = (note for note in caught.value.__notes__ if note.startswith("on rank 0:"))
    assert re.search(r"PartitaError: .*another rank ended", other), other


def trains(folder: str) -> None:
    with partita.initialize(Stack(3), config(folder)) as engine:
        take_steps(engine, 2)


@pytest.mark.parametrize("call", ["_read", "_write"])
def test_a_killed_rank(call: str, tmp_path: Path) -> None:
    """If a rank is killed, the other one ends with an error, no file is left, and the next run can use the folder."""
    with pytest.raises(WorkerError, match="rank 1 died with exit code -9") as caught:
        on_ranks(2, killed_in_a_step, str(tmp_path), call)
    (other,) = (note for note in caught.value.__notes__ if note.startswith("on rank 0:"))
    assert re.search(r"PartitaError: .*another rank ended", other), other
    assert list(tmp_path.iterdir()) == []
    on_ranks(2, trains, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def through_the_page_cache(folder: str) -> None:
    recipe = Recipe(Stack, config={"clip_grad_norm": 0.5})
    expected = train_recipe(recipe, ZERO["3"])
    with pytest.MonkeyPatch.context() as patch:
        refuse(patch, "buffered")
        with pytest.warns(UserWarning, match="does not support O_DIRECT requests") as caught:
            found = train_recipe(recipe, config(folder)["zero"])
    assert len(caught) == 1
    assert_same_bits(found, expected, "through the page cache")


def test_a_filesystem_without_direct_requests(tmp_path: Path) -> None:
    on_ranks(2, through_the_page_cache, str(tmp_path))


def waits_for_the_disk(folder: str) -> None:
    """Check that the unshard-order check accepts a gather which takes longer than its patience."""
    recipe = Recipe(Stack)
    expected = train_recipe(recipe, ZERO["3"])
    with mock.patch.object(unshard_order, "PATIENCE_S", 0.0):
        assert_same_bits(train_recipe(recipe, config(folder)["zero"]), expected, "without patience")


@pytest.mark.parametrize("world", [1, 2])
def test_a_slow_disk(world: int, tmp_path: Path) -> None:
    on_ranks(world, waits_for_the_disk, str(tmp_path))


# ---------------------------------------------------------------------------------------------------------- host memory


def bytes_on_host(offload: dict[str, str]) -> int:
    """Return the bytes of this rank's states on the host."""
    seeds.start()
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    with partita.initialize(model, {"zero": {"stage": 3, "offload": offload}}) as engine:
        for step in range(2):
            engine.backward(engine(inputs(rank(), step, 4, 64)).square().mean())
            engine.step()
        engine.zero_grad()
        held = engine.memory_report()
    assert held.held == {key: num for key, num in held.peak.items() if num}, "nothing is held for a while only"
    return sum(num for (_, tier), num in held.held.items() if tier == "host")


@pytest.mark.parametrize("world", [1, 2, 4])
def test_host_memory_holds_each_state_once(world: int) -> None:
    held = on_ranks(world, bytes_on_host, {"parameters": "host", "optimizer": "host"})
    assert sum(held) == 16 * 3 * 64 * 64, "parameters, gradients and two moments in fp32"
    assert len(set(held)) == 1
