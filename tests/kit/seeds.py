"""Random numbers of the tests: fresh while developing, always the same in continuous integration, and repeatable."""

import os
import random

import torch

VARIABLE = "PARTITA_TEST_SEED"  # in the environment, where the processes that tests start find it, too


def chosen() -> int:
    """This run's seed: that of the environment, else 0 in continuous integration, else a random one."""
    return int(
        os.environ.setdefault(VARIABLE, "0" if "CI" in os.environ else str(random.SystemRandom().randrange(10**6)))
    )


def start(number: int = 0) -> None:
    """Seed torch's default generator with this run's sequence of that number."""
    torch.manual_seed(chosen() * 10**6 + number)


def generator(number: int = 0) -> torch.Generator:
    """A generator at the beginning of this run's sequence of that number."""
    return torch.Generator().manual_seed(chosen() * 10**6 + number)
