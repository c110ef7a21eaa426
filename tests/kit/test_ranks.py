"""Tests of the pool of ranks: order of results, errors with their rank, hangs with their stacks, no leaks."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.kit import ranks
from tests.kit.ranks import WorkerError, close_pool, on_ranks


class UnpicklableError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def sum_of_ranks() -> float:
    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value)
    return value.item()


def echo(*values: Any) -> tuple[Any, ...]:
    return values


def process_id() -> int:
    return os.getpid()


def environment() -> dict[str, str]:
    return {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}


def has_group() -> bool:
    return dist.is_initialized()


def start_group_from_environment() -> float:
    dist.init_process_group("gloo")
    return sum_of_ranks()


def fail_on(rank: int) -> float:
    if dist.get_rank() == rank:
        raise KeyError(f"wrong on {rank}")
    return sum_of_ranks()


def fail_unpicklably() -> None:
    raise UnpicklableError(1, 2)


def return_unpicklable() -> Any:
    return threading.Lock()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() != rank:
        wait_for_the_others()


def wait_for_the_others() -> None:
    dist.barrier()


def fail_or_sleep() -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        raise ValueError("only rank 0")
    time.sleep(60)


def set_variable() -> None:
    os.environ["PARTITA_TEST_LEAK"] = "1"


def get_variable() -> str | None:
    return os.environ.get("PARTITA_TEST_LEAK")


def start_thread() -> None:
    threading.Thread(target=time.sleep, args=(3,), name="left-behind").start()


def start_process() -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(4)"]).pid


def warn() -> None:
    warnings.warn("heard on the rank", FutureWarning, stacklevel=1)


def random_numbers() -> tuple[float, float]:
    return torch.rand(()).item(), random.random()


def change_threads() -> None:
    torch.set_num_threads(2)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results_come_in_rank_order(world: int) -> None:
    assert on_ranks(world, sum_of_ranks) == [world * (world - 1) / 2] * world
    assert [env["RANK"] for env in on_ranks(world, environment)] == [str(rank) for rank in range(world)]


def test_environment_of_a_rank() -> None:
    expected = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert on_ranks(2, environment)[1] == expected
    assert "RANK" not in os.environ


def test_workers_stay() -> None:
    pids = on_ranks(3, process_id)
    assert len(set(pids)) == 3
    assert on_ranks(2, process_id) == pids[:2]


def test_tensors_travel_both_ways_by_value() -> None:
    sent = torch.arange(6.0).reshape(2, 3).t()
    (returned,) = on_ranks(1, echo, sent, {"bf16": sent.bfloat16()})
    assert torch.equal(returned[0], sent)
    assert torch.equal(returned[1]["bf16"], sent.bfloat16())


def test_without_a_group_a_rank_can_start_its_own() -> None:
    assert on_ranks(2, has_group, with_group=False) == [False, False]
    assert on_ranks(2, start_group_from_environment, with_group=False) == [1.0, 1.0]
    assert on_ranks(2, has_group, with_group=False) == [False, False]


def test_error_keeps_its_type_and_names_rank_and_place() -> None:
    with pytest.raises(KeyError, match="wrong on 1") as raised:
        on_ranks(2, fail_on, 1)
    notes = "\n".join(raised.value.__notes__)
    assert "on rank 1:" in notes
    assert "in fail_on" in notes
    assert notes.index("on rank 1:") < notes.index("on rank 0:"), "the first to fail comes first"
    assert on_ranks(2, sum_of_ranks) == [1.0, 1.0]


def test_error_that_cannot_be_pickled() -> None:
    with pytest.raises(WorkerError, match=r"raised .*UnpicklableError: 1 and 2") as raised:
        on_ranks(1, fail_unpicklably)
    assert "in fail_unpicklably" in raised.value.__notes__[0]


def test_result_that_cannot_be_pickled() -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        on_ranks(1, return_unpicklable)


def test_function_that_is_not_at_the_top_level() -> None:
    with pytest.raises((AttributeError, TypeError), match=r"[Cc]an't pickle|cannot pickle"):
        on_ranks(1, lambda: None)


def test_death_of_a_rank_shows_its_stack_and_the_pool_recovers() -> None:
    with pytest.raises(WorkerError, match=f"rank 1 died with exit code -{signal.SIGSEGV.value}") as raised:
        on_ranks(2, die_on, 1)
    assert "die_on" in raised.value.__notes__[0]
    assert on_ranks(2, sum_of_ranks) == [1.0, 1.0]


def test_hang_shows_stacks_of_those_that_wait_and_the_pool_recovers() -> None:
    before = on_ranks(3, process_id)
    with pytest.raises(WorkerError, match=r"ranks \[0, 2\] did not answer within 3 s") as raised:
        on_ranks(3, hang_on, 1, timeout=3)
    assert str(raised.value).count("in wait_for_the_others") == 2
    after = on_ranks(3, process_id)
    assert not set(before) & set(after)


def test_error_on_one_rank_while_another_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_AFTER_FAILURE_S", 0.2)
    with pytest.raises(ValueError, match="only rank 0") as raised:
        on_ranks(2, fail_or_sleep)
    notes = "\n".join(raised.value.__notes__)
    assert "rank 1 was stuck at:" in notes
    assert "in fail_or_sleep" in notes


def test_interrupted_run_leaves_no_busy_rank_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ranks, "_collect", interrupt)
        with pytest.raises(KeyboardInterrupt):
            on_ranks(2, time.sleep, 60)
    assert on_ranks(2, sum_of_ranks) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("leave", "what"),
    [(set_variable, "variable PARTITA_TEST_LEAK"), (start_thread, "thread left-behind"), (start_process, "process ")],
)
def test_leak_on_a_rank_fails(leave: Any, what: str) -> None:
    with pytest.raises(AssertionError, match=f"leaked on rank 0: .*{what}"):
        on_ranks(1, leave)
    close_pool()


def test_environment_is_restored_after_a_leak() -> None:
    with pytest.raises(AssertionError, match="PARTITA_TEST_LEAK"):
        on_ranks(1, set_variable)
    assert on_ranks(1, get_variable) == [None]


def test_warnings_are_errors_on_ranks_as_in_tests() -> None:
    with pytest.raises(FutureWarning, match="heard on the rank"):
        on_ranks(1, warn)


@pytest.mark.filterwarnings("ignore:heard on the rank")
def test_warning_filters_of_the_test_hold_on_ranks() -> None:
    on_ranks(1, warn)


def test_seeds_repeat_from_call_to_call_and_differ_between_ranks() -> None:
    first, second = on_ranks(2, random_numbers)
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert on_ranks(2, random_numbers) == [first, second]


def test_one_thread_a_rank() -> None:
    on_ranks(1, change_threads)
    assert on_ranks(1, torch.get_num_threads) == [1]


def test_close_ends_the_workers() -> None:
    pids = on_ranks(2, process_id)
    close_pool()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
