"""Python's garbage collector, while very many objects are made."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from partita.memory.collector import collector_paused


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
