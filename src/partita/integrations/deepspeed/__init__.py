"""DeepSpeed's API for existing training loops: ``import partita.integrations.deepspeed as deepspeed``, or
``partita run``, which imports it as ``deepspeed`` in an unchanged script.

Names and meanings are those of DeepSpeed 0.19.8. A name that is missing here raises an error with the alternative.
"""

from typing import NoReturn

from partita.integrations.deepspeed import accelerator, comm, runtime, utils, zero
from partita.integrations.deepspeed.accelerator import get_accelerator
from partita.integrations.deepspeed.comm import init_distributed
from partita.integrations.deepspeed.engine import DeepSpeedEngine
from partita.integrations.deepspeed.start import add_config_arguments, initialize
from partita.integrations.deepspeed.unsupported import MODULE, missing

# DeepSpeed's version, by which scripts find out which features exist.
__version__ = "0.19.8"
__all__ = [
    "DeepSpeedEngine",
    "accelerator",
    "add_config_arguments",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "runtime",
    "utils",
    "zero",
]


def __getattr__(name: str) -> NoReturn:
    raise missing("deepspeed", name, MODULE)
