"""The result of applying the parallel axes: each rank's share of the parameters, and the changes to the modules."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from partita.parallel.pipeline.cut import Cut
from partita.parallel.pipeline.off_stage import bring_back
from partita.parallel.random import RandomStreams
from partita.parallel.tensor.parameter import Part
from partita.plan.share import Share
from partita.transforms.modules import ModuleTransforms


@dataclass
class Parallel:
    """Everything that the parallel axes changed in a model.

    Attributes:
        shares: this rank's share of each parameter, by id. A parameter without a share is unsplit, and held by this
            stage alone.
        parts: how the tensor ranks hold the parameters that they split, or of which each has a copy; by id.
        lines: a report: how each module is split, and which rule decided it.
        said: messages to log at the start.
        changes: the changes to the modules, which :meth:`remove` undoes.
        cut: where the stages of the pipeline begin; None without a pipeline.
        away: the parameters that only other stages hold.
        passing: wrappers of the placeholder outputs of blocks, by the block's id.
        ending: called when a stage's forward has ended.
        streams: the modules' streams of random numbers; None if they draw from torch's generators.
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
        """Begin micro-batch ``number`` in the batch of a ``step``: the next forwards belong to it."""
        if self.streams is not None:
            self.streams.begin_micro_batch(step, number)

    def remove(self) -> None:
        """Restore every module's own forward and attributes.

        Parameters are left as they are. Those that only other stages hold become ordinary parameters again if they
        still have their values.
        """
        self.changes.undo()
        for param in self.away:
            if not param.is_meta:
                bring_back(param)
