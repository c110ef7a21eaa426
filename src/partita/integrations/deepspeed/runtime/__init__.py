"""``deepspeed.runtime``: only its :mod:`~partita.integrations.deepspeed.runtime.dataloader`."""

from typing import NoReturn

from partita.integrations.deepspeed.runtime import dataloader
from partita.integrations.deepspeed.unsupported import RUNTIME, missing

__all__ = ["dataloader"]


def __getattr__(name: str) -> NoReturn:
    raise missing("deepspeed.runtime", name, RUNTIME)
