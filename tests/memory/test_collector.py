"""Pausing and freezing Python's garbage collector while many objects are created."""

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from partita.memory.collector import collector_frozen, collector_paused


@pytest.fixture(autouse=True)
def collector_as_before() -> Iterator[None]:
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


def test_the_last_block_left_lets_it_work_again() -> None:
    gc.enable()
    outer = ExitStack()
    outer.enter_context(collector_paused())
    with pytest.raises(KeyError), collector_paused():
        outer.close()
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_one_that_the_user_turned_off_stays_off() -> None:
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_it_works_in_a_child_that_is_forked_meanwhile() -> None:
    gc.enable()
    with collector_paused():
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert not gc.isenabled()


def test_what_was_there_is_not_looked_at_inside_the_block() -> None:
    gc.unfreeze()
    kept = [object() for _ in range(3)]
    before = gc.get_freeze_count()
    with pytest.raises(KeyError), collector_frozen():
        assert gc.get_freeze_count() > before
        assert not any(each is kept for each in gc.get_objects())
        raise KeyError
    assert gc.get_freeze_count() == before
    assert any(each is kept for each in gc.get_objects())
