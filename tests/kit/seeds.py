"""Seeds of the tests: random during development, fixed in continuous integration, and repeatable."""

import os
import random

import torch

VARIABLE = "PARTITA_TEST_SEED"  # an environment variable, which processes that tests start inherit


def chosen() -> int:
    """Return this run's seed: from the environment, else 0 in continuous integration, else a random one."""
    return int(
        os.environ.setdefault(VARIABLE, "0" if "CI" in os.environ else str(random.SystemRandom().randrange(10**6)))
    )


def start(number: int = 0) -> None:
    """Seed torch's default generator from this run's seed and ``number``."""
    torch.manual_seed(chosen() * 10**6 + number)


def generator(number: int = 0) -> torch.Generator:
    """Return a new generator that is seeded from this run's seed and ``number``."""
    return torch.Generator().manual_seed(chosen() * 10**6 + number)
