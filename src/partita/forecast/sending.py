"""The ways that gradients and parameters get from rank to rank, beside that of each stage."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# From what loses least on; the first two are right on average.
CODECS = ("int8", "int4", "ternary")
# What parameters may have where they are computed with as they come, which coarser codes are too coarse for.
FINEST = CODECS[0]

Keys = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Sending:
    """A name, and what the sections ``zero`` and ``communication`` of a config say of it."""

    name: str = ""
    zero: Keys = ()
    communication: Keys = ()


# Of several the first is meant that contradicts nothing else.
Ways = tuple[Sending, ...]

AS_STAGES_DO = Sending()
HIERARCHICAL = Sending("hierarchical", (("hierarchical", True),))
REPLICATED = Sending("split within nodes", (("replicate", "nodes"),))
INSIDE_NODES: tuple[Ways, ...] = ((REPLICATED,), (HIERARCHICAL,))


def as_codes() -> Iterator[tuple[Ways, ...]]:
    """For each codec the ways to send it."""
    for codec in CODECS:
        flat = tuple(_coded(AS_STAGES_DO, codec, parameters) for parameters in dict.fromkeys((codec, FINEST, "full")))
        yield flat, (_coded(HIERARCHICAL, codec, codec),)


def _coded(plain: Sending, gradients: str, parameters: str) -> Sending:
    coded = {"gradients": gradients, "parameters": parameters}
    keys = tuple((key, codec) for key, codec in coded.items() if codec != "full")
    what = f"{gradients} gradients" + (f" and {parameters} parameters" if parameters != "full" else "")
    name = f"{gradients} sent" if gradients == parameters else f"{what} sent"
    return Sending(", ".join(filter(None, (plain.name, name))), plain.zero, keys)
