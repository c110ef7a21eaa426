"""The random generators that a training loop draws from: torch's, the accelerator's, Python's and numpy's."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from partita.memory import accelerator


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of all generators; ``device`` is the one that this rank computes on."""
    name, keys, place, has_gauss, gauss = numpy.random.get_state()
    states = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(numpy.asarray(keys).astype(numpy.int64)), place, has_gauss, gauss),
    }
    if accelerator.has_streams(device):
        states[device.type] = accelerator.random_state(device)
    return states


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Set all generators to what :func:`random_states` returned."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    numpy.random.set_state((name, keys.numpy().astype(numpy.uint32), *rest))
    if device.type in states:
        accelerator.set_random_state(states[device.type], device)


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Restore all generators at the end of a block that may draw from them."""
    states = random_states(device)
    try:
        yield
    finally:
        set_random_states(states, device)
