"""Workers: jobs of one key run in order, those of different keys in parallel, and an error stays with its key."""

import random
import subprocess
import sys
import threading
import weakref

import pytest

from partita.memory.streams import Workers


@pytest.fixture
def workers() -> Workers:
    return Workers("test", 4)


def test_jobs_of_a_key_are_in_order(workers: Workers) -> None:
    done: dict[int, list[int]] = {key: [] for key in range(5)}
    order = [random.randrange(5) for _ in range(300)]
    for number, key in enumerate(order):
        workers.run(key, [lambda key=key, number=number: done[key].append(number)] * random.randrange(1, 4))
    workers.close()
    for key, numbers in done.items():
        assert numbers == sorted(numbers)
        assert set(numbers) == {number for number, other in enumerate(order) if other == key}


def test_pieces_and_keys_are_side_by_side(workers: Workers) -> None:
    meet = threading.Barrier(4, timeout=60)
    events = [workers.run("one", [meet.wait] * 2), workers.run("two", [meet.wait]), workers.run("three", [meet.wait])]
    for event in events:
        event.wait()
    workers.close()


def test_an_error_stays_with_its_key_until_it_is_forgotten(workers: Workers) -> None:
    done, may = list[str](), threading.Event()
    before = workers.run("bad", [may.wait])
    failed = workers.run("bad", [lambda: done.append("beside"), lambda: {}["nothing"]])
    queued = workers.run("bad", [lambda: done.append("after")])
    other = workers.run("good", [lambda: done.append("other")])
    may.set()
    before.wait()
    other.wait()
    for event in (failed, queued, failed):
        with pytest.raises(KeyError, match="nothing"):
            event.wait()
    with pytest.raises(KeyError, match="nothing"):
        workers.run("bad", [lambda: done.append("later")]).wait()
    workers.forget("bad")
    workers.run("bad", [lambda: done.append("anew")]).wait()
    workers.close()
    assert "after" not in done
    assert "later" not in done
    assert {"other", "anew"} <= set(done)


def test_forget_waits(workers: Workers) -> None:
    done, may = list[int](), threading.Event()
    workers.run("key", [may.wait])
    workers.run("key", [lambda: done.append(1)])
    threading.Timer(0.05, may.set).start()
    workers.forget("key")
    assert done == [1]
    workers.close()


@pytest.mark.parametrize("end", ["close", "drop"])
def test_threads_come_with_work_and_end(end: str) -> None:
    before = set(threading.enumerate())
    workers = Workers("test", 3)
    assert not set(threading.enumerate()) - before
    may, done = threading.Event(), list[int]()
    workers.run("key", [may.wait])
    last = workers.run("key", [lambda: done.append(1)])
    own = set(threading.enumerate()) - before
    assert len(own) == 3
    may.set()
    if end == "close":
        workers.close()
        workers.close()
    del workers
    last.wait()  # also if only the job itself still references the workers
    for thread in own:
        thread.join(60)
        assert not thread.is_alive()
    assert done == [1]


def test_work_after_close_is_done(workers: Workers) -> None:
    done = list[int]()
    for number in range(2):
        workers.run("key", [lambda number=number: done.append(number)]).wait()
        workers.close()
    assert done == [0, 1]


def test_a_piece_is_let_go_of_before_its_job_is_done(workers: Workers) -> None:
    class Held:
        pass

    held = Held()
    alive = weakref.ref(held)
    event = workers.run("key", [lambda held=held: None])
    del held
    event.wait()
    assert alive() is None
    workers.close()


ENDING = """
import threading, time
import torch
from partita.memory.streams import Workers

workers, value = Workers("test", 2), torch.randn(256, 256)
for number in range(40):
    workers.run(number % 2, [lambda: [value @ value for _ in range(5)], lambda: time.sleep(0.001)])
workers.run(0, [lambda: print("all done", flush=True)])
workers.run("stuck", [threading.Event().wait])
"""


def test_a_process_that_ends_finishes_what_goes_on() -> None:
    """A process that exits finishes its jobs, but does not wait for a job that never ends."""
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "all done\n"
