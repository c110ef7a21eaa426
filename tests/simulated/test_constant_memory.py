"""Test that the engine holds the same memory after every step, whatever the length of its inputs."""

import gc
from typing import Any

import pytest
import torch

from tests.kit import seeds
from tests.kit.ranks import on_ranks
from tests.simulated.training import VOCAB, on, open_engine, simulated

NUM_STEPS = 200
CONFIG = {**on(3), "activations": {"checkpoint": "units", "offload": "host"}, "loss": {"tiled": 4 * 4 * VOCAB}}


def held_after_steps() -> list[dict[str, Any]]:
    """Return, for each step, the device bytes allocated since before the engine, and the bytes in the memory report."""
    from tests.simulated.device import register

    native = register()
    before = native.memory()[0]
    found = []
    lengths = torch.randint(2, 40, (NUM_STEPS,), generator=seeds.generator()).tolist()
    with open_engine(CONFIG) as engine:
        for length in [40, *lengths]:
            tokens = torch.randint(0, VOCAB, (3, length), generator=seeds.generator(length)).to(engine.mesh.device)
            engine.backward(engine(tokens))
            engine.step()
            del tokens
            gc.collect(0)
            held = engine.memory_report().held
            found.append(
                {
                    "allocated": native.memory()[0] - before,
                    "device": sum(num for (_, tier), num in held.items() if tier == "device"),
                    "host": sum(num for (_, tier), num in held.items() if tier == "host"),
                    "rest": {state: num for (state, tier), num in held.items() if tier == "device"},
                }
            )
    return found


@pytest.mark.thorough
def test_every_step_leaves_what_the_ledger_says() -> None:
    (found, races), *_ = on_ranks(1, simulated, held_after_steps, with_group=False, timeout=200)
    assert races == []
    _, *later = found  # the first step allocates the buffers that the engine keeps
    assert {(one["allocated"], one["device"], one["host"]) for one in later} == {
        (later[0]["allocated"], later[0]["device"], later[0]["host"])
    }, later[:3]
    # Besides pools and states, the engine holds the flags and the norm of the last step.
    assert 0 <= later[0]["allocated"] - later[0]["device"] <= 512, later[0]
