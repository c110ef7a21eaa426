"""Logs of ranks that are behind, ahead, or apart."""

import random
from typing import Any

import pytest

from partita.comm.collective_log import NUM_SHOWN, STEP, CollectiveLog
from tests.kit.threads import Notes


def ranks(num: int) -> list[CollectiveLog]:
    notes = [""] * num
    logs = [CollectiveLog() for _ in range(num)]
    for rank, log in enumerate(logs):
        board: Any = Notes(rank, notes)
        log.board = board
        assert log.register(["one", "two"]) == 1
        assert log.register(["other"]) == 3
    return logs


def test_events_are_described() -> None:
    log = ranks(1)[0]
    said = [log.describe(event) for event in (STEP, 1, 2, 3)]
    assert said == ["is at engine.step()", "gathers 'one'", "gathers 'two'", "gathers 'other'"]


def test_no_difference_while_one_log_begins_as_the_other() -> None:
    logs = ranks(3)
    events = [random.randint(0, 3) for _ in range(3 * NUM_SHOWN)]
    done = [0, 0, 0]
    while any(place < len(events) for place in done):
        rank = random.randrange(3)
        if done[rank] < min(len(events), min(done) + NUM_SHOWN // 2):
            logs[rank].add(events[done[rank]])
            done[rank] += 1
        if random.random() < 0.1:
            assert logs[rank].difference() is None


def test_old_notes_are_no_difference() -> None:
    logs = ranks(2)
    logs[1].add(1)
    assert logs[1].difference() is None
    for event in [1, *[2, 3] * NUM_SHOWN]:
        logs[0].add(event)
    assert logs[0].difference() is None


@pytest.mark.parametrize("before", [0, 5, NUM_SHOWN - 1, NUM_SHOWN, 5 * NUM_SHOWN])
def test_the_first_difference_is_found_by_whoever_looks_second(before: int) -> None:
    one, other, late = ranks(3)
    events = [random.randint(0, 3) for _ in range(before)]
    for log in (one, other):
        for event in events:
            log.add(event)
    for event in (1, 2, 3):
        one.add(event)
    for event in (1, 3):
        other.add(event)
    assert one.difference() is None
    assert other.difference() == one.difference() == [2, 3, None]
    for event in [*events, 1, STEP]:
        late.add(event)
    assert late.difference() == other.difference() == [2, 3, STEP]
