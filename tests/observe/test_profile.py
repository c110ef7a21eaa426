"""Profile of a step: the engine's work and waits next to torch's events, and the report of waits."""

import gzip
import json
from collections import Counter
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest

import partita
from partita import PartitaError
from partita.memory.step_events import Watcher, in_span, sent, span, watched_by
from partita.table.traffic import TrafficKey
from tests.kit.models import Stack, square_loss
from tests.kit.ranks import on_ranks
from tests.kit.training import rank

STEPS = 2
NUM_UNITS = 5  # four blocks and the root


def profiled(folder: str) -> tuple[list[dict[str, Any]], Any, dict[str, float]]:
    """Return the events of this rank's trace, the report, and the bytes sent per step for each purpose."""
    path = Path(folder) / f"trace-{rank()}.json.gz"
    with partita.initialize(Stack(4), {"zero": {"stage": 3, "offload": {"optimizer": "disk"}}}) as engine:
        take_step(engine, 0)
        before = engine.traffic_report()
        with engine.profile(path) as profile:
            for step in range(STEPS):
                take_step(engine, step)
        counted = Counter[str]()
        for key, count in engine.traffic_report().since(before).rows.items():
            counted[key.purpose] += count.sent_bytes
        take_step(engine, 0)
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        return events, profile.report, {purpose: num / STEPS for purpose, num in counted.items()}


def take_step(engine: Any, step: int) -> None:
    engine.backward(square_loss(engine, rank(), step))
    engine.step()
    engine.memory_report()  # waits for the end of the update


def test_a_trace_has_what_was_done_and_waited_for(tmp_path: Path) -> None:
    for events, report, counted in on_ranks(2, profiled, str(tmp_path)):
        process = next(event["pid"] for event in events if event.get("args", {}).get("name", "").startswith("partita,"))
        own = [event for event in events if event["pid"] == process and event["ph"] == "X"]
        lanes = {e["tid"]: e["args"]["name"] for e in events if e["pid"] == process and e["name"] == "thread_name"}
        done = Counter((lanes[event["tid"]], event["cat"]) for event in own)
        gathered = Counter(event["name"] for event in own if event["cat"] == "gather")
        assert all(gathered[f"gather blocks.{at}"] == 2 * STEPS for at in range(4)), gathered
        assert done["updates", "update"] == NUM_UNITS * STEPS
        assert done["gradients", "reduce"] >= STEPS
        assert done["disk", "disk"] > 0
        assert done["main", "wait for gather"] > 0
        assert done["main", "wait for ranks"] > 0
        torchs = [event for event in events if event.get("cat") == "cpu_op"]
        first, last = min(event["ts"] for event in torchs), max(event["ts"] + event["dur"] for event in torchs)
        assert all(first - 1e6 < event["ts"] < last + 1e6 for event in own), "on one clock"
        assert report.num_steps == STEPS
        assert report.sent_bytes == counted
        assert 0 < sum(report.waited_ms.values()) < report.step_ms
        assert "waited for gather" in str(report)


def test_what_cannot_be_profiled(tmp_path: Path) -> None:
    with partita.initialize(Stack(1)) as engine:
        with pytest.raises(PartitaError, match="no optimizer step was taken inside the block"):
            with engine.profile(tmp_path / "none.json") as profile:
                pass
            assert profile.report
        with (
            engine.profile(tmp_path / "open.json") as profile,
            pytest.raises(PartitaError, match="or it has not ended: .*read the report after the block"),
        ):
            assert profile.report
        (tmp_path / "file").touch()
        with (
            pytest.raises(PartitaError, match=r"cannot write '.*file/trace.json'"),
            engine.profile(tmp_path / "file" / "trace.json"),
        ):
            pass
        with pytest.raises(ZeroDivisionError), engine.profile(tmp_path / "failed.json"):
            raise ZeroDivisionError
        assert not (tmp_path / "failed.json").exists()


def test_nothing_is_wrapped_while_nobody_watches() -> None:
    def work() -> None:
        pass

    assert in_span(work, "gather", "a unit") is work
    assert span("gather") is span("reduce")


class Heard(Watcher):
    def __init__(self) -> None:
        self.spans, self.num_sent = list[str](), 0

    def span(self, what: str, name: str) -> AbstractContextManager[None]:
        self.spans.append(what)
        return nullcontext()

    def sent(self, key: TrafficKey, num_bytes: int) -> None:
        self.num_sent += num_bytes


def test_watchers_come_and_go_in_any_order() -> None:
    """A watcher that begins while another watches may end after it."""
    first, second = Heard(), Heard()
    one, other = ExitStack(), ExitStack()
    key = TrafficKey("all_reduce", ("data",), "gradients")
    for number, (stack, change) in enumerate(((one, first), (other, second), (one, None), (other, None))):
        stack.close() if change is None else stack.enter_context(watched_by(change))
        with span(f"{number}"):
            sent(key, 10**number)
    assert (first.spans, first.num_sent) == (["0", "1"], 11)
    assert (second.spans, second.num_sent) == (["1", "2"], 110)
