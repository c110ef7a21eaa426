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


AS_STAGES_DO = Sending()
HIERARCHICAL = Sending("hierarchical", (("hierarchical", True),))
REPLICATED = Sending("split within nodes", (("replicate", "nodes"),))


def sendings(*, several_nodes: bool, compress: bool) -> Iterator[tuple[Sending, ...]]:
    """Those besides a stage's own, each as a few of which the first is meant that is none of a contradiction: on
    several nodes with more inside them, and with ``compress`` as codes, which lose something.
    """
    if several_nodes:
        yield (REPLICATED,)
        yield (HIERARCHICAL,)
    for codec in CODECS if compress else ():
        yield tuple(_coded(AS_STAGES_DO, codec, parameters) for parameters in (codec, FINEST, "full"))
        if several_nodes:
            yield (_coded(HIERARCHICAL, codec, codec),)


def _coded(plain: Sending, gradients: str, parameters: str) -> Sending:
    coded = {"gradients": gradients, "parameters": parameters}
    keys = tuple((key, codec) for key, codec in coded.items() if codec != "full")
    return Sending(", ".join(filter(None, (plain.name, f"{gradients} sent"))), plain.zero, keys)
