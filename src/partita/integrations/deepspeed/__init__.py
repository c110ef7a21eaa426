"""DeepSpeed's calls for training loops that are written with them: one changed line,
``import partita.integrations.deepspeed as deepspeed``.

The names and meanings are those of DeepSpeed 0.19.8; a name that is not here is an error that says what partita has in
its place.
"""

from typing import NoReturn

from partita.integrations.deepspeed import comm, zero
from partita.integrations.deepspeed.comm import init_distributed
from partita.integrations.deepspeed.elsewhere import MODULE, missing
from partita.integrations.deepspeed.engine import DeepSpeedEngine
from partita.integrations.deepspeed.start import add_config_arguments, initialize

# Of DeepSpeed: scripts that look at it expect what it could do then.
__version__ = "0.19.8"
__all__ = ["DeepSpeedEngine", "add_config_arguments", "comm", "init_distributed", "initialize", "zero"]


def __getattr__(name: str) -> NoReturn:
    raise missing("deepspeed", name, MODULE)
