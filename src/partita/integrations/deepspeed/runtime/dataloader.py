"""``deepspeed.runtime.dataloader``: the loader that repeats."""

from typing import NoReturn

from partita.integrations.deepspeed.unsupported import RUNTIME, missing
from partita.integrations.deepspeed.utils import RepeatingLoader

__all__ = ["RepeatingLoader"]


def __getattr__(name: str) -> NoReturn:
    raise missing("deepspeed.runtime.dataloader", name, RUNTIME)
