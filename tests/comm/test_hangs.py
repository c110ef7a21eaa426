"""If a rank is stopped or killed, or ends with an error, the other ranks raise an error that names it."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import partita
from partita import PartitaError
from partita.comm import group, stall, synchronization_check
from partita.comm.watchdog import STORE_TIMEOUT_S, Position
from partita.memory.streams import Event
from partita.sharding import runtime, unshard_order
from tests.kit.models import Stack, square_loss
from tests.kit.plans import sampled
from tests.kit.ranks import WorkerError, on_ranks
from tests.kit.training import rank, world
from tests.parallel import stages

TIMEOUT_S = 4.0


STAGES_AND_WAYS = [(1, "memory"), (3, "memory"), (3, "network")]
ON_MEMORY, ON_NETWORK = sampled(STAGES_AND_WAYS, (1, "memory")), sampled(STAGES_AND_WAYS, (3, "network"))


def engine_of(stage: int, way: str, timeout_s: float = TIMEOUT_S) -> partita.Engine:
    communication = {"timeout_s": timeout_s, "within_node": way}
    return partita.initialize(Stack(3), {"zero": {"stage": stage}, "communication": communication})


def step_of(engine: partita.Engine, step: int) -> None:
    engine.backward(square_loss(engine, rank(), step))
    engine.step()


def stops(stage: int, way: str) -> str:
    """Stop rank 1 in its second step until rank 0 has raised. Return this rank's error."""
    said = ""
    try:
        with engine_of(stage, way) as engine:
            step_of(engine, 0)
            pids = [int(pid) for pid in engine.each(os.getpid())]
            loss = square_loss(engine, rank(), 1)
            if rank() == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            engine.backward(loss)
            engine.step()
    except PartitaError as error:
        said = str(error)
    finally:
        if rank() == 0:
            os.kill(pids[1], signal.SIGCONT)
    return said


@pytest.mark.parametrize(("stage", "way"), ON_NETWORK)
def test_a_rank_that_is_stopped(stage: int, way: str) -> None:
    waiting, stopped = on_ranks(2, stops, stage, way)
    assert re.search(r"rank 0, after [12] micro-batches, ", waiting)
    assert "rank 1 does not answer: its process was stopped or has ended" in waiting
    assert f"communication.timeout_s, {TIMEOUT_S:g} s" in waiting
    assert "rank 0 ended with PartitaError" in stopped


def lags(stage: int, way: str) -> str:
    """Delay rank 1 for longer than the time-out. Return this rank's error."""
    try:
        with engine_of(stage, way) as engine:
            step_of(engine, 0)
            if rank() == 1:
                dawdle_somewhere()
            step_of(engine, 1)
    except PartitaError as error:
        return str(error)
    return ""


def dawdle_somewhere() -> None:
    time.sleep(TIMEOUT_S + 4)


@pytest.mark.parametrize(("stage", "way"), ON_MEMORY)
def test_a_rank_that_is_behind_shows_its_stack(stage: int, way: str) -> None:
    said = on_ranks(2, lags, stage, way)[0]
    assert "rank 1, after 1 micro-batches, " in said
    assert "in dawdle_somewhere" in said


def leaves(stage: int, way: str) -> str:
    """End rank 1 with an error. Return this rank's error."""
    try:
        with engine_of(stage, way) as engine:
            step_of(engine, 0)
            if rank() == 1:
                raise ValueError("the data of step 1\nis missing")
            step_of(engine, 1)
    except (ValueError, PartitaError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("stage", "way"), ON_NETWORK)
def test_a_rank_that_leaves_with_an_error(stage: int, way: str) -> None:
    said = on_ranks(2, leaves, stage, way)[0]
    assert "rank 1 ended with ValueError: the data of step 1" in said


def waits_for_its_device(call: str) -> str:
    """End rank 1 with an error while rank 0's device, on which a number is computed, waits for it. Return rank 0's
    error.
    """
    never = Event(query=lambda: False)
    agreed: Any = mock.Mock(scales=(), has_written=False, has_changed_buffers=False)
    try:
        with engine_of(1, "memory", 60) as engine:
            step_of(engine, 0)
            if rank() == 1:
                raise ValueError("the data of step 1\nis missing")
            with mock.patch.multiple(group, record=lambda device: never, LOOK_S=0.1):
                if call == "norm":
                    engine._parts.updater._consensus.norm([torch.ones(())], agreed, 2)
                else:
                    engine.mean(1.0)
    except (ValueError, PartitaError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("call", "name"), [("norm", "the norm of engine.step"), ("mean", "a number of every rank")])
def test_a_rank_that_leaves_while_a_device_waits_for_it(call: str, name: str) -> None:
    said = on_ranks(2, waits_for_its_device, call, timeout=30)[0]
    assert said.startswith(f"rank 0: {name} over data failed: rank 1 ended with ValueError: the data of step 1. ")
    assert "the accelerator has not completed earlier collectives" in said


def ends_when_asked() -> str:
    """Return rank 0's description of the ranks; rank 1 does not answer, and ends with an error after the question."""
    with partita.initialize(Stack(2), {}) as engine:
        watchdog = engine.mesh.watchdog
        assert watchdog is not None
        said = ""
        if rank() == 0:
            with mock.patch("partita.comm.watchdog.ANSWER_S", 60):
                said = watchdog.describe_ranks()
        else:
            watchdog.close()
            while not watchdog._get("asked"):
                time.sleep(0.01)
            watchdog.ended(ValueError("the data of step 1"))
        engine.each(0)
        return said


def test_a_rank_that_ends_in_place_of_answering() -> None:
    own = on_ranks(2, ends_when_asked)[0].splitlines()[1]
    assert re.fullmatch(r"rank 1, after 0 micro-batches, has .*, ended with ValueError: the data of step 1", own)


def closes_during_a_request() -> bool:
    """Close a watchdog during a request to the store that exceeds its time-out. Return True if its thread is alive."""
    with partita.initialize(Stack(2), {}) as engine:
        watchdog = engine.mesh.watchdog
        assert watchdog is not None
        asked, real = threading.Event(), watchdog._get

        def slow(key: str) -> str:
            asked.set()
            time.sleep(STORE_TIMEOUT_S + 1)
            return real(key)

        with mock.patch.object(watchdog, "_get", slow):
            assert asked.wait(60)
            watchdog.close()
        return watchdog._thread.is_alive()


def test_a_closed_watchdog_has_no_thread() -> None:
    """close waits for the watchdog's thread; a process that exits during the thread's request would abort."""
    assert on_ranks(2, closes_during_a_request) == [False, False]


def raises_in_a_stage(way: str, in_backward: bool) -> tuple[str, str]:
    """Raise an error on the last rank in its second batch. Return the errors of this batch and of the next."""
    batches = [stages.batch("skipping", 0)] * 2
    communication = {"timeout_s": 60, "within_node": way}
    config = {"parallel": {"pipeline": 2}, "batch": {"accumulate": 2}, "communication": communication}
    engine = partita.initialize(model := stages.Skipping(), config)
    engine.train_batch(batches)
    if rank() == world() - 1:
        if in_backward:
            model.head.register_full_backward_hook(raise_value_error)
        else:
            model.head.register_forward_hook(raise_value_error)
    with pytest.raises((ValueError, PartitaError)) as caught:
        engine.train_batch(batches)
    with pytest.raises(PartitaError) as again:
        engine.train_batch(batches)
    return str(caught.value), str(again.value)


def raise_value_error(*args: object) -> None:
    raise ValueError("the data of step 1\nis missing")


@pytest.mark.parametrize(("way", "in_backward"), [("memory", False), ("network", True)])
def test_an_error_in_a_stage_of_a_pipeline(way: str, in_backward: bool) -> None:
    """All ranks, also of the other pipeline, raise within seconds, and none can train with the incomplete batch."""
    *others, (own, _) = results = on_ranks(4, raises_in_a_stage, way, in_backward, timeout=30)
    assert own == "the data of step 1\nis missing"
    for said, _ in others:
        assert "rank 3 ended with ValueError: the data of step 1" in said.partition("\n")[0]
    for said, again in results:
        first = said.partition("\n")[0]
        assert "the engine is closed by an error inside a batch of the pipeline (" in again
        assert f"Error: {first}): make a new one with partita.initialize" in again


def dies(stage: int, way: str, folder: str, with_child: bool = False) -> None:
    """Kill rank 1; if ``with_child``, its forked child lives on. The other ranks write their error into a file."""
    try:
        with engine_of(stage, way) as engine:
            step_of(engine, 0)
            if rank() == 1:
                if with_child:
                    fork_a_child(Path(folder, "said-0"))
                os.kill(os.getpid(), signal.SIGKILL)
            step_of(engine, 1)
    except PartitaError as error:
        Path(folder, f"said-{rank()}").write_text(str(error))
        raise


@pytest.mark.parametrize(("stage", "way"), ON_MEMORY)
def test_a_rank_that_is_killed(stage: int, way: str, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="rank 1 died"):
        on_ranks(3, dies, stage, way, str(tmp_path))
    for other in (0, 2):
        assert (
            "rank 1 does not answer: its process was stopped or has ended" in (tmp_path / f"said-{other}").read_text()
        )


def fork_a_child(until: Path) -> None:
    """Fork a child, which inherits all file descriptors and lives until a file exists, at most for a minute."""
    if not os.fork():
        for _ in range(600):
            if until.exists():
                break
            time.sleep(0.1)
        os._exit(0)


@pytest.mark.parametrize(("stage", "way"), ON_NETWORK)
def test_a_rank_that_is_killed_beside_a_child(stage: int, way: str, tmp_path: Path) -> None:
    """A live child (such as a DataLoader's worker) keeps no connections open: the other ranks need no time-out."""
    with pytest.raises(WorkerError, match="rank 1 died"):
        on_ranks(2, dies, stage, way, str(tmp_path), True)
    said = (tmp_path / "said-0").read_text()
    assert "rank 1 does not answer: its process was stopped or has ended" in said
    assert "Backend: " in said
    assert not re.search("timed out|timeout", said.partition("Backend: ")[2], re.IGNORECASE)


COLLECTIVES = {
    "barrier": dist.barrier,
    "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
    "all_gather": lambda: dist.all_gather_object([None] * world(), "checkpoint-1"),
    "broadcast": lambda: dist.broadcast_object_list(["checkpoint-1"], src=0),
}


def runs_alone(name: str, way: str) -> str:
    """Run the model on rank 0 alone, before a collective of torch in which rank 1 waits. Return this rank's error."""
    said = ""
    with (
        mock.patch.multiple(stall, FIRST_S=0.1, CONFIRM_S=0.1),
        mock.patch.object(unshard_order, "PATIENCE_S", 0.7),
        mock.patch.object(runtime, "agree", getattr(unshard_order, way)),
    ):
        try:
            with engine_of(3, "memory", 8) as engine:
                step_of(engine, 0)
                if rank() == 0:
                    square_loss(engine, 0, 1)
                COLLECTIVES[name]()
        except PartitaError as error:
            said = str(error)
            COLLECTIVES[name]()
    return said


@pytest.mark.parametrize(
    ("name", "way"), [*((name, "ComparedLogs") for name in COLLECTIVES), ("barrier", "RepeatedOrder")]
)
def test_a_rank_that_runs_the_model_alone(name: str, way: str) -> None:
    said = on_ranks(2, runs_alone, name, way)[0]
    assert said.startswith("rank 0 gathers '")
    assert f"waits for rank 1, which waits for rank 0 in torch.distributed.{name} ({__file__}:" in said
    assert "inside `with engine.gathered(engine.module):`, which every rank enters" in said


def runs_alone_on_whole_parameters() -> None:
    """Check that the remedy in the error, engine.gathered, works."""
    with engine_of(3, "memory", 20) as engine:
        for step in range(2):
            step_of(engine, step)
            with engine.gathered(engine.module):
                if rank() == 0:
                    assert square_loss(engine, 0, 1).isfinite()
                dist.barrier()


def test_a_rank_that_runs_the_model_alone_on_whole_parameters() -> None:
    on_ranks(2, runs_alone_on_whole_parameters)


def meets_another_first() -> None:
    """Check that rank 0 waits for rank 1 while that waits for the late rank 2 in a collective without rank 0."""
    store, looks, judge = dist.distributed_c10d._get_default_store(), [], stall.Stall._judge

    def count(self: stall.Stall, positions: dict[int, Position], waited_s: float) -> None:
        judge(self, positions, waited_s)
        looks.append(positions[1].blocked)
        if len(looks) == 3:
            store.set("looked", "")

    group = dist.new_group([1, 2])
    with (
        mock.patch.multiple(stall, FIRST_S=0.1, CONFIRM_S=0.1),
        mock.patch.object(unshard_order, "PATIENCE_S", 0.7),
        mock.patch.object(stall.Stall, "_judge", count),
        engine_of(3, "memory", 20) as engine,
    ):
        step_of(engine, 0)
        if rank() == 2:
            store.get("looked")
        if rank() > 0:
            dist.barrier(group)
        step_of(engine, 1)
    if rank() == 0:
        assert any(blocked is not None and blocked.ranks == (1, 2) for blocked in looks)


def test_a_rank_that_meets_another_first_is_waited_for() -> None:
    on_ranks(3, meets_another_first)


def one_waits_for_a_late_rank() -> None:
    """Rank 0 is at a call of the engine, and rank 1 waits in another collective for rank 2, which is late."""
    group = dist.new_group([1, 2])
    with mock.patch.object(synchronization_check, "PATIENCE_S", 0.2), engine_of(1, "memory", 30) as engine:
        if rank() == 2:
            time.sleep(4)
        if rank():
            dist.barrier(group)
        engine.barrier()


def test_a_call_waits_for_ranks_that_wait_for_a_late_one() -> None:
    on_ranks(3, one_waits_for_a_late_rank)


def calls_on_one_rank() -> str:
    """Call the engine on rank 0 alone, and leave its block with the error. The time-out is not reached."""
    with pytest.raises(PartitaError) as caught, engine_of(3, "network", 120) as engine:
        step_of(engine, 0)
        if rank() == 0:
            engine.barrier()
        else:
            square_loss(engine, rank(), 1)
    return str(caught.value)


def test_an_engine_is_closed_after_a_call_on_one_rank() -> None:
    said, _ = on_ranks(2, calls_on_one_rank, timeout=40)
    assert said.startswith("rank 0 is at engine.barrier, but rank 1 waits in another collective")


def is_late() -> list[str]:
    """Delay rank 1 until rank 0 has named it in a warning. Return this rank's warnings."""
    store, said = dist.distributed_c10d._get_default_store(), list[str]()

    def note(message: str, *values: Any) -> None:
        said.append(message % values)
        store.set("named", "")

    with (
        mock.patch.multiple(stall, FIRST_S=0.1, WARN_S=0.1),
        mock.patch.object(unshard_order, "PATIENCE_S", 0.7),
        mock.patch.object(stall._log, "warning", note),
        engine_of(3, "memory", 20) as engine,
    ):
        step_of(engine, 0)
        if rank() == 1:
            store.get("named")
        step_of(engine, 1)
    return said


def test_a_rank_that_is_late_is_named_once() -> None:
    said, nothing = on_ranks(2, is_late)
    assert not nothing
    assert len(said) == 1
    assert re.match(r"rank 0 gathers '.*' and has waited \d+ s for rank 1 \(.* in is_late\); it waits for", said[0])


ALONE = """
import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
if accelerator.is_main_process:
    accelerator.save_state("saved")
accelerator.wait_for_everyone()
"""


@pytest.mark.thorough
def test_a_process_ends_though_nobody_answers_its_message(tmp_path: Path) -> None:
    """A process ends although gloo's destructor waits until the time-out for a message that rank 0 gave up."""
    (tmp_path / "alone.py").write_text(ALONE)
    command = [sys.executable, "-m", "partita.cli.main", "run", "--processes", "2", "alone.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode
    assert "call engine.save on every rank" in done.stdout + done.stderr
