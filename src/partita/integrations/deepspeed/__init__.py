"""DeepSpeed's API for existing training loops. One line changes:
``import partita.integrations.deepspeed as deepspeed``.

Names and meanings are those of DeepSpeed 0.19.8. A name that is missing here raises an error with the alternative.
"""

from typing import NoReturn

from partita.integrations.deepspeed import comm, zero
from partita.integrations.deepspeed.comm import init_distributed
from partita.integrations.deepspeed.engine import DeepSpeedEngine
from partita.integrations.deepspeed.start import add_config_arguments, initialize
from partita.integrations.deepspeed.unsupported import MODULE, missing

# DeepSpeed's version, by which scripts find out which features exist.
__version__ = "0.19.8"
__all__ = ["DeepSpeedEngine", "add_config_arguments", "comm", "init_distributed", "initialize", "zero"]


def __getattr__(name: str) -> NoReturn:
    raise missing("deepspeed", name, MODULE)
