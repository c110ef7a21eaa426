"""Crash test, for a test and a benchmark: ``kill -9`` of a random rank at a random moment of training and saving.

Each run resumes from what the last kill left, under another stage and tier, and every loss must be bit-identical to
that of an uninterrupted run.
"""

import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import partita
from partita import PartitaError
from partita.checkpoint.format.folder import complete_checkpoints
from partita.checkpoint.format.stored import open_stored
from partita.checkpoint.offline import verify
from tests.kit import seeds
from tests.kit.models import WIDTH, Stack
from tests.kit.ranks import WorkerError, close_pool, on_ranks
from tests.kit.training import ADAMW, rank

RANKS = 2
OFFLOADS: tuple[dict[str, str], ...] = ({}, {"optimizer": "host"}, {"optimizer": "disk", "parameters": "disk"})
# Longest time until the kill, after all ranks have started (in the first run: after its first checkpoint).
LONGEST_S = 0.5
# File in which a rank reports a wrong loss; its error could be hidden by that of the killed rank.
WRONG = "wrong"


@dataclass(frozen=True)
class Killed:
    """Result of a kill: the rank, True if a checkpoint was being written, and the step of the newest one afterwards."""

    rank: int
    while_saving: bool
    newest: int


def config(number: int) -> dict[str, Any]:
    offload, stage = OFFLOADS[number % len(OFFLOADS)], 1 + number % 2 * 2
    return {
        "zero": {"stage": stage, "offload": offload},
        "optimizer": ADAMW,
        "checkpoint": {"keep": 2, "background": number % 4 < 3},
        "communication": {"timeout_s": 20},
    }


def step_of(engine: partita.Engine, step: int) -> float:
    samples = torch.randn(4, WIDTH, generator=seeds.generator(RANKS * step + rank()))
    loss = engine(samples).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def uninterrupted(num_steps: int) -> list[float]:
    """Return this rank's losses of an uninterrupted run."""
    seeds.start()
    with partita.initialize(Stack(2), config(0)) as engine:
        return [step_of(engine, step) for step in range(num_steps)]


def train_until_killed(folder: str, number: int, expected: list[list[float]]) -> None:
    """Resume, then train and save until the process is killed or the expected losses end."""
    seeds.start()
    with partita.initialize(Stack(2), config(number)) as engine:
        first = engine.load(folder).step if complete_checkpoints(Path(folder)) else 0
        (Path(folder) / f"running-{rank()}").write_text(str(os.getpid()))
        for step in range(first, len(expected[rank()])):
            loss = step_of(engine, step)
            if loss != expected[rank()][step]:
                (Path(folder) / WRONG).write_text(f"step {step}: loss {loss}, expected {expected[rank()][step]}")
            if step % 3 == 0:
                engine.save(folder)


def kill_once(folder: Path, number: int, expected: list[list[float]], chance: random.Random) -> Killed:
    """Start a run and kill one rank. Raise an error if its losses, or the checkpoints that it leaves, are wrong."""
    victim, delay_s, seen = chance.randrange(RANKS), chance.uniform(0, LONGEST_S), list[bool]()
    running = [folder / f"running-{rank}" for rank in range(RANKS)]
    for path in running:
        path.unlink(missing_ok=True)

    def kill() -> None:
        def ready() -> bool:  # the first run is not killed before there is a checkpoint for the others
            return all(path.exists() and path.read_text() for path in running) and (
                number > 0 or bool(complete_checkpoints(folder))
            )

        end = time.monotonic() + 60
        while not ready() and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(delay_s)
        seen.append(any(path.name.endswith(".partial") for path in folder.iterdir()))
        os.kill(int(running[victim].read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        on_ranks(RANKS, train_until_killed, str(folder), number, expected)
    except (WorkerError, PartitaError):
        pass
    else:
        raise AssertionError("the run came to its end before it was killed")
    finally:
        killer.join()
        close_pool()
    if (wrong := folder / WRONG).exists():
        raise AssertionError(wrong.read_text())
    found = complete_checkpoints(folder)
    for path in found.values():
        problems = list(verify(open_stored(path)))
        assert not problems, problems
    return Killed(victim, seen[0], max(found, default=0))
