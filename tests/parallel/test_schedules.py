"""Pipeline schedules: their simulated cost is the theoretical one, and deadlocks are detected."""

from dataclasses import replace

import pytest

from partita import PartitaError
from partita.parallel.pipeline.schedule import Shape, Work, make_schedule
from partita.parallel.pipeline.schedule_cost import simulate, waiting_per_work


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micros", [1, 2, 3, 5, 8, 13])
def test_bubbles_are_those_of_theory(ranks: int, micros: int) -> None:
    for name in ("gpipe", "1f1b"):
        bubble = simulate(make_schedule(name, Shape(ranks, micros))).bubble
        assert bubble == pytest.approx((ranks - 1) / (micros + ranks - 1))
    for chunks in (2, 3, 4):
        bubble = simulate(make_schedule("interleaved", Shape(ranks, micros, chunks))).bubble
        if micros >= ranks > 1:
            assert bubble == pytest.approx((ranks - 1) / (micros * chunks + ranks - 1))


@pytest.mark.parametrize("ranks", [2, 4])
def test_weights_apart_fill_bubbles(ranks: int) -> None:
    micros = 4 * ranks
    course = simulate(make_schedule("zero_bubble", Shape(ranks, micros)))
    assert course.bubble == pytest.approx((ranks - 1) / (3 * micros + ranks - 1))
    assert max(course.max_kept_forwards) <= 1.5 * ranks


@pytest.mark.parametrize("backward", [2.0, 3.0])
@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("zero_bubble", 1)])
def test_long_batches_wait_as_long_as_short_ones(name: str, chunks: int, backward: float) -> None:
    for ranks, micros in ((2, 20), (4, 12), (4, 32), (4, 35), (3, 21)):
        shape = Shape(ranks, micros, chunks)
        bubble = simulate(make_schedule(name, shape), backward).bubble
        assert waiting_per_work(name, shape, backward) == pytest.approx(bubble / (1 - bubble))


def test_recomputation_lengthens_the_bubbles_of_zero_bubble() -> None:
    # A rank waits for 3 x (forward + input gradient - weight gradient): 1 + 1 - 1, or 1 + 2 - 1 with recomputation.
    shape = Shape(4, 16)
    assert waiting_per_work("zero_bubble", shape, 2.0) == pytest.approx(3 * 1 / (16 * 3))
    assert waiting_per_work("zero_bubble", shape, 3.0) == pytest.approx(3 * 2 / (16 * 4))


def test_forwards_kept() -> None:
    shape = Shape(4, 8)
    assert simulate(make_schedule("1f1b", shape)).max_kept_forwards == (4, 3, 2, 1)
    assert simulate(make_schedule("gpipe", shape)).max_kept_forwards == (8, 8, 8, 8)


def test_every_stage_does_all_of_every_micro_batch_once() -> None:
    for name, shape in (("1f1b", Shape(3, 5)), ("interleaved", Shape(3, 7, 2)), ("zero_bubble", Shape(3, 5))):
        schedule = make_schedule(name, shape)
        works = Work if name == "zero_bubble" else (Work.FORWARD, Work.BACKWARD)
        expected = {(w, m, c) for w in works for m in range(shape.micros) for c in range(shape.chunks)}
        for order in schedule.orders:
            assert len(order) == len(expected)
            assert {(action.work, action.micro, action.chunk) for action in order} == expected


def test_text() -> None:
    assert str(make_schedule("1f1b", Shape(2, 3))) == "rank 0: F0 F1 B0 F2 B1 B2\nrank 1: F0 B0 F1 B1 F2 B2"


def test_one_rank_does_one_micro_batch_after_the_other() -> None:
    for name in ("gpipe", "1f1b", "zero_bubble"):
        assert str(make_schedule(name, Shape(1, 2))) == "rank 0: F0 B0 F1 B1"


def test_orders_that_hang_or_cross_are_found() -> None:
    good = make_schedule("1f1b", Shape(2, 3))
    hangs = replace(good, orders=(good.orders[0][2:] + good.orders[0][:2], good.orders[1]))
    with pytest.raises(PartitaError, match=r"cannot be run: rank 0 would wait forever before B0"):
        simulate(hangs)
    gpipe = make_schedule("gpipe", Shape(2, 3))
    first, second, *others = gpipe.orders[0]
    crosses = replace(gpipe, orders=((second, first, *others), gpipe.orders[1]))
    with pytest.raises(PartitaError, match="rank 0 sends to rank 1 in another order than rank 1 receives"):
        simulate(crosses)
