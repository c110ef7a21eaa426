"""What the parallel axes did to a model: what each rank has of its parameters, and what runs in place of forwards."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from partita.parallel.pipeline.absent import bring_back
from partita.parallel.pipeline.cut import Cut
from partita.parallel.random import RandomStreams
from partita.parallel.tensor.parameter import Part
from partita.plan.share import Share
from partita.transforms.modules import ModuleTransforms


@dataclass
class Parallel:
    """``shares``: what this rank has of each parameter that is not whole here alone, ``parts``
    how the tensor ranks hold those that they split, both by id. ``lines`` say how each module is
    split, and who decided; ``said`` is to be told at the start; ``streams`` are of its random numbers, if they have
    any of their own; ``cut`` is where the pipeline's stages begin, ``away`` are the parameters that only other stages
    hold. ``passing``: of blocks, by id, what is done around their stand-ins where other stages run them; ``ending``:
    what is done when a stage's forward has ended.
    """

    shares: dict[int, Share] = field(default_factory=dict)
    parts: dict[int, Part] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    changes: ModuleTransforms = field(default_factory=ModuleTransforms)
    cut: Cut | None = None
    away: list[nn.Parameter] = field(default_factory=list)
    passing: dict[int, Callable[..., Any]] = field(default_factory=dict)
    ending: list[Callable[[], None]] = field(default_factory=list)
    streams: RandomStreams | None = None

    def begin_micro_batch(self, step: int, number: int) -> None:
        """The forwards that follow are of the micro-batch ``number`` in the batch of a ``step``."""
        if self.streams is not None:
            self.streams.begin_micro_batch(step, number)

    def remove(self) -> None:
        """Give every module its own forward and attributes back. Parameters are left as they are; those that are held
        elsewhere are the model's own again if they still have their values.
        """
        self.changes.undo()
        for param in self.away:
            if not param.is_meta:
                bring_back(param)
