"""Collective logs of ranks that are behind or ahead, or that run different operations."""

import random
from typing import Any

import pytest

from partita.comm import collective_log
from partita.comm.collective_log import NUM_SHOWN, STEP, UPDATE, CollectiveLog, Successors
from tests.kit import seeds
from tests.kit.threads import Notes


@pytest.mark.parametrize("seed", range(20))
def test_an_order_that_repeats_is_expected(seed: int) -> None:
    """A repeated order of events is predicted, also with repetitions inside it, and again after other events."""
    generator = random.Random(1000 * seeds.chosen() + seed)
    pieces = [[generator.choice([STEP, 2, 3, 4, 5]) for _ in range(generator.randint(1, 30))] for _ in range(3)]
    step = [*(event for _ in range(generator.randint(1, 10)) for event in generator.choice(pieces)), UPDATE]
    between = [generator.randint(2, 7) for _ in range(generator.randint(1, 30))]
    successors = Successors()

    def num_unexpected(events: list[int]) -> int:
        found = 0
        for event in events:
            found += not successors.expect(event)
            successors.add(event)
        return found

    assert num_unexpected(step) > 0
    assert num_unexpected(3 * step) == 0
    assert num_unexpected([*between, *step]) > 0
    assert num_unexpected(step) <= 2
    assert num_unexpected(3 * step) == 0
    assert num_unexpected([*between, *step]) <= 2
    assert num_unexpected([*step, *between, *step]) <= 4


def test_old_events_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_log, "MOST_EVENTS", 50)
    successors = Successors()
    for event in [*range(2, 1000), UPDATE, *[*range(2, 20), UPDATE] * 2]:
        successors.add(event)
    for event in [*range(2, 20), UPDATE] * 20:
        assert successors.expect(event)
        successors.add(event)
    assert len(successors._events) <= 100


def ranks(num: int) -> list[CollectiveLog]:
    notes = [""] * num
    logs = [CollectiveLog() for _ in range(num)]
    for rank, log in enumerate(logs):
        board: Any = Notes(rank, notes)
        log.board = board
        assert log.register(["one", "two"]) == 2
        assert log.register(["other"]) == 4
    return logs


def test_events_are_described() -> None:
    log = ranks(1)[0]
    said = [log.describe(event) for event in (STEP, UPDATE, 2, 3, 4)]
    steps = ["is at engine.step()", "has changed parameters"]
    assert said == [*steps, "gathers 'one'", "gathers 'two'", "gathers 'other'"]


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
