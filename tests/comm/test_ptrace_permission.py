"""The process that is named to the kernel as permitted to read this process's memory."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest

import partita
from partita.comm.node import ptrace_permission
from partita.comm.node.ptrace_permission import common_ancestor, grant, revoke
from tests.kit.models import Stack
from tests.kit.ranks import on_ranks


@contextmanager
def named(scope: str | None, folder: Path) -> Iterator[list[int]]:
    """The processes that are named in the block, in order, under a ``ptrace_scope`` (None: a kernel without Yama)."""
    calls: list[int] = []
    file = folder / f"scope-{os.getpid()}"
    if scope is not None:
        file.write_text(f"{scope}\n")
    with (
        mock.patch.object(ptrace_permission, "_SCOPE", file),
        mock.patch.object(ptrace_permission, "_set_tracer", calls.append),
    ):
        yield calls


@pytest.fixture
def siblings() -> Iterator[list[int]]:
    """The process IDs of two children of this process."""
    with ExitStack() as started:
        processes = [started.enter_context(subprocess.Popen(["sleep", "60"])) for _ in range(2)]
        yield [process.pid for process in processes]
        for process in processes:
            process.kill()


def test_the_fewest_processes(siblings: list[int]) -> None:
    one, other = siblings
    assert common_ancestor([]) == 0
    assert common_ancestor([one]) == one
    assert common_ancestor([one, other]) == os.getpid()
    assert common_ancestor([one, os.getpid()]) == os.getpid()


@pytest.mark.parametrize(("parent", "expected"), [(1, 1), (2, 0)])
def test_init_is_named_by_its_own_children_only(siblings: list[int], parent: int, expected: int) -> None:
    with mock.patch.object(ptrace_permission.os, "getppid", return_value=parent):
        assert common_ancestor([siblings[0], 1]) == expected


def test_named_for_as_long_as_one_of_them_is_admitted(siblings: list[int], tmp_path: Path) -> None:
    one, other = siblings
    with named("1", tmp_path) as calls:
        grant([one])
        grant([one, other])
        revoke([one])
        revoke([other])
        revoke([one])
    assert calls == [one, os.getpid(), one, 0]


@pytest.mark.parametrize("scope", [None, "0", "2", "3"])
def test_nobody_is_named_where_nobody_asks(scope: str | None, siblings: list[int], tmp_path: Path) -> None:
    with named(scope, tmp_path) as calls:
        grant(siblings)
        revoke(siblings)
    assert calls == []


def named_by_engines(folder: str) -> tuple[int, list[int], list[int]]:
    with named("1", Path(folder)) as calls:
        with partita.initialize(Stack(1)) as one:
            with partita.initialize(Stack(1)):
                pass
            assert one.mesh.transport(("data",)).peers
            meanwhile = list(calls)
    return os.getpid(), meanwhile, calls


def test_named_until_the_last_mesh_is_closed(tmp_path: Path) -> None:
    (pid, _, _), (_, meanwhile, named_in_all) = on_ranks(2, named_by_engines, str(tmp_path))
    assert set(meanwhile) == {pid}
    assert named_in_all[-1] == 0
