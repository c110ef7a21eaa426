"""The unshard-order check on transports without tags: its messages, and that no rank reads wrong data."""

import contextlib
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import partita
from partita import PartitaError
from partita.comm import stall
from partita.comm.blocked import Blocked
from partita.comm.collective_log import STEP, UPDATE, CollectiveLog
from partita.comm.collectives import Collectives
from partita.comm.stall import Stall
from partita.comm.watchdog import Position
from partita.memory.step_events import Watcher, watched_by
from partita.memory.streams import Event
from partita.sharding import runtime, unshard_order
from partita.sharding.unshard_order import ComparedLogs, RepeatedOrder
from partita.table.mesh_shape import BATCH_AXES, MeshShape
from partita.table.traffic import TrafficKey
from tests.kit import seeds, threads
from tests.kit.models import Stack, inputs, square_loss
from tests.kit.plans import PLANS, matrix
from tests.kit.ranks import on_ranks
from tests.kit.training import rank
from tests.sharding.test_ranks_differ import Chosen

UNITS = range(2, 8)
PATIENCE_S = 0.02


class Gathers:
    """A backend that matches the ranks' gathers by their order: each ends when every rank has launched it."""

    def __init__(self, num_ranks: int) -> None:
        self.launched = [list[int]() for _ in range(num_ranks)]
        self._changed = threading.Condition()

    def launch(self, rank: int, unit: int) -> Event:
        with self._changed:
            self.launched[rank].append(unit)
            self._changed.notify_all()
        place = len(self.launched[rank])

        def wait_for(seconds: float) -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: all(len(units) >= place for units in self.launched), seconds)

        return Event(wait_for=wait_for)


def orders(generator: random.Random, num_ranks: int) -> tuple[list[list[int]], bool]:
    """Return the log of each rank (units it gathers, ends of steps, updates), and True if the logs differ."""
    kinds = [[generator.choice(UNITS) for _ in range(generator.randint(1, 12))] for _ in range(2)]
    steps = [generator.choices(kinds, [5, 1])[0] for _ in range(6)]
    common = [event for step in steps for event in (*step, STEP, UPDATE)]
    every = [list(common) for _ in range(num_ranks)]
    if generator.random() < 0.3:
        return every, False
    place, mine = generator.randrange(len(common) // 2), generator.choice(every)
    change = generator.choice(["replace", "remove", "insert"])
    mine[place : place + (change != "insert")] = [] if change == "remove" else [generator.choice(UNITS)]
    return every, mine != common


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("seed", range(15))
def test_ranks_never_gather_different_units_at_once(num_ranks: int, seed: int) -> None:
    every, differ = orders(random.Random(1000 * seeds.chosen() + seed), num_ranks)
    gathers = Gathers(num_ranks)

    def on_rank(collectives: Collectives) -> str:
        mesh: Any = collectives.mesh
        deadline = time.monotonic() + 50 * PATIENCE_S

        def stalled() -> None:
            if time.monotonic() > deadline:  # the other ranks have finished, or found the difference
                raise PartitaError("nobody comes")

        order = RepeatedOrder(collectives.group(BATCH_AXES), mesh, stalled)
        assert mesh.log.register(list(map(str, UNITS))) == UNITS[0]
        try:
            for event in every[mesh.rank]:
                if event == STEP:
                    order.step()
                elif event == UPDATE:
                    order.updated()
                else:
                    order.gathers(event)
                    order.wait(gathers.launch(mesh.rank, event))
        except PartitaError as error:
            return str(error)
        return ""

    with mock.patch.object(threads, "TIMEOUT_S", 20 * PATIENCE_S), mock.patch.object(unshard_order, "PATIENCE_S", 0.02):
        said = threads.on_threads(MeshShape(data=num_ranks), on_rank, BATCH_AXES)
    for units in zip(*gathers.launched, strict=False):
        assert len(set(units)) == 1
    assert any(said) == differ, said
    if differ:
        assert any("the ranks run different modules" in each for each in said), said


class Messages(Watcher):
    """Counts the control messages of this rank."""

    def __init__(self) -> None:
        self.num = 0

    def span(self, what: str, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def sent(self, key: TrafficKey, num_bytes: int) -> None:
        self.num += key.purpose == "control"


@contextlib.contextmanager
def without_tags() -> Iterator[None]:
    """Context in which engines check orders as if the transport had no tags."""
    with mock.patch.object(runtime, "agree", RepeatedOrder):
        yield


def messages_of_steps(config: dict[str, Any], accumulate: int) -> list[int]:
    """Return the number of control messages of each of six steps, with an evaluation before the fourth."""
    found = []
    with without_tags(), partita.initialize(Stack(), {**config, "batch": {"accumulate": accumulate}}) as engine:
        for step in range(6):
            if step == 3:
                with torch.no_grad():
                    engine(inputs(rank(), 100))
            messages = Messages()
            with watched_by(messages):
                for micro in range(accumulate):
                    engine.backward(square_loss(engine, rank(), 10 * step + micro))
                    engine.step()
            found.append(messages.num)
    return found


ORDERED = {name: plan for name, plan in PLANS.items() if name.startswith("3")}
# Messages of every step: the gradients that each rank has, and the norm.
NUM_MESSAGES = 2


@matrix(name=ORDERED, accumulate=[1, 3], world=[2, 4])
def test_a_step_in_the_order_of_the_last_one_sends_nothing_about_it(name: str, accumulate: int, world: int) -> None:
    for found in on_ranks(world, messages_of_steps, ORDERED[name], accumulate):
        assert found[0] > NUM_MESSAGES + 5, "every unit is new in the first step"
        assert found[2] == found[5] == NUM_MESSAGES
        assert found[3] <= NUM_MESSAGES + 5, "after an evaluation"
        assert found[4] == NUM_MESSAGES + 1, "without one"


def waits_for_the_device() -> str:
    """Make rank 0, which gathers in the expected order, wait for its device, because rank 1 gathers another unit."""
    wait: Callable[[ComparedLogs, Event], None] = ComparedLogs.wait

    def blocked(self: ComparedLogs, gathered: Event) -> None:
        gathered.wait() if rank() == 0 else wait(self, gathered)

    try:
        with without_tags(), partita.initialize(Chosen(), {"zero": {"stage": 3}}) as engine:
            for step in range(2):
                engine.backward(engine(inputs(rank(), step), [0, 1, 2, 3]).square().mean())
                engine.step()
            with mock.patch.object(ComparedLogs, "wait", blocked):
                engine(inputs(rank(), 2), [0, 1, 2, 3] if rank() == 0 else [0, 2, 3])
    except PartitaError as error:
        return str(error)
    return ""


def test_a_rank_that_waits_for_its_device_is_named() -> None:
    _, said = on_ranks(2, waits_for_the_device, timeout=60)
    assert re.search(r"rank 0 gathers 'blocks.\d'; rank 1 gathers 'blocks.\d'", said), said


def runs_alone() -> list[str]:
    """Run the model on rank 0 only, which waits for its device, while rank 1 waits in an all-reduce with a timeout.

    Returns the errors that this rank has logged.
    """
    said = list[str]()

    def blocked(self: ComparedLogs, gathered: Event) -> None:
        gathered.wait()

    def is_behind(self: Event) -> bool:
        return self._wait_for is not None and not self._wait_for(0.0)

    group = dist.new_group(timeout=timedelta(seconds=20))
    with contextlib.suppress(PartitaError, RuntimeError), without_tags():
        with partita.initialize(Stack(), {"zero": {"stage": 3}}) as engine:
            for step in range(2):
                engine.backward(square_loss(engine, rank(), step))
                engine.step()
            with (
                mock.patch.object(ComparedLogs, "wait", blocked),
                mock.patch.object(Event, "is_behind", is_behind),
                mock.patch.object(unshard_order, "FIRST_S", 0.1),
                mock.patch.multiple(stall, FIRST_S=0.1, CONFIRM_S=0.1),
                mock.patch.object(unshard_order._log, "error", lambda text, *values: said.append(text % values)),
            ):
                if rank() == 0:
                    engine(inputs(0, 2))
                dist.all_reduce(torch.ones(1), group=group)
    return said


def test_a_rank_that_waits_for_its_device_while_others_wait_for_it_says_so() -> None:
    (said, *_), nothing = on_ranks(2, runs_alone, timeout=60)
    assert not nothing
    assert said.startswith("rank 0 gathers '")
    assert f"waits for rank 1, which waits for rank 0 in torch.distributed.all_reduce ({__file__}:" in said


def test_a_rank_that_has_gathered_as_much_keeps_nobody_waiting() -> None:
    """A rank in a barrier that has launched as many gathers as this rank is not stuck: this device may be slow."""
    log = CollectiveLog()
    log.add(log.register(["block"]))
    mesh: Any = SimpleNamespace(watchdog=mock.Mock(), rank=0, log=log, timeout_s=1.0)
    mesh.watchdog.describe_ranks.return_value = ""
    barrier = Blocked("barrier", (0, 1), "script.py:1")
    for events, is_stuck in ((1, False), (0, True)):
        waiting = Stall(mesh, [0, 1])
        with pytest.raises(PartitaError) if is_stuck else contextlib.nullcontext():
            for _ in range(2):
                waiting._judge({1: Position(events, "script.py:1", barrier)}, 3.0)


def two_engines() -> None:
    """Use two engines, and on rank 1 use them in another order in the last step."""
    with without_tags(), partita.initialize(Stack(1), {"zero": {"stage": 3}}) as one:
        other = partita.initialize(Stack(1), {"zero": {"stage": 3}}, mesh=one.mesh)
        for step in range(3):
            for engine in (other, one) if rank() and step == 2 else (one, other):
                engine.backward(square_loss(engine, rank(), step))
                engine.step()


def test_engines_share_their_order() -> None:
    with pytest.raises(PartitaError, match="the ranks run different modules: rank 0 gathers '.*'; rank 1 gathers '"):
        on_ranks(2, two_engines, timeout=60)
