"""Communication settings of gradients and parameters, in addition to the default of each ZeRO stage."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Sorted by loss of precision, least first. The first two are unbiased.
CODECS = ("int8", "int4", "ternary")
# The codec for parameters. Forward computes with the decoded parameters, and the other codecs are too coarse for that.
FINEST = CODECS[0]

Keys = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class CommunicationSettings:
    """A communication setting: a name, and its keys in the config sections zero and communication."""

    name: str = ""
    zero_keys: Keys = ()
    communication_keys: Keys = ()


# Alternatives: the first that is valid with the remaining config is used.
Alternatives = tuple[CommunicationSettings, ...]

STAGE_DEFAULT = CommunicationSettings()
HIERARCHICAL = CommunicationSettings("hierarchical", (("hierarchical", True),))
REPLICATED = CommunicationSettings("split within nodes", (("replicate", "nodes"),))
INSIDE_NODES: tuple[Alternatives, ...] = ((REPLICATED,), (HIERARCHICAL,))


def quantized_alternatives() -> Iterator[tuple[Alternatives, ...]]:
    """Yield the communication settings for each codec."""
    for codec in CODECS:
        flat = tuple(
            _quantized(STAGE_DEFAULT, codec, parameters) for parameters in dict.fromkeys((codec, FINEST, "full"))
        )
        yield flat, (_quantized(HIERARCHICAL, codec, codec),)


def _quantized(base: CommunicationSettings, gradients: str, parameters: str) -> CommunicationSettings:
    codecs = {"gradients": gradients, "parameters": parameters}
    keys = tuple((key, codec) for key, codec in codecs.items() if codec != "full")
    what = f"{gradients} gradients" + (f" and {parameters} parameters" if parameters != "full" else "")
    name = f"{gradients} sent" if gradients == parameters else f"{what} sent"
    return CommunicationSettings(", ".join(filter(None, (base.name, name))), base.zero_keys, keys)
