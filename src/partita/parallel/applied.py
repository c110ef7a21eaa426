"""The result of applying the parallel axes: each rank's share of the parameters, and the changes to the modules."""

from dataclasses import dataclass, field

from partita.parallel.block_outputs import BlockOutputs
from partita.parallel.pipeline.cut import StageCut
from partita.parallel.random import RandomStreams
from partita.parallel.sequence.blocks import Blocks
from partita.parallel.tensor.functions import CopyToTensorRanks
from partita.parallel.tensor.parameter import TensorSharding
from partita.table.share import Share
from partita.transforms.modules import ModuleTransforms


@dataclass
class AppliedParallelism:
    """Everything that the parallel axes changed in a model.

    Attributes:
        shares: this rank's share of each parameter, by id. A parameter without a share is unsplit, and held by this
            stage alone.
        parts: how the tensor ranks hold the parameters that they split, or of which each has a copy; by id.
        lines: a report: how each module is split, and which rule decided it.
        notices: messages to log at the start.
        transforms: the changes to the modules.
        cut: where the stages of the pipeline begin; None without a pipeline.
        copy_input: the inputs of layers that are split over tensor ranks; None without tensor parallelism.
        stacks: the blocks that run on slices of the sequence, by the module that contains them.
        block_outputs: the outputs of single blocks that the model collects; None without a pipeline or sequence
            parallelism.
        streams: the modules' streams of random numbers; None if they draw from torch's generators.
    """

    shares: dict[int, Share] = field(default_factory=dict)
    parts: dict[int, TensorSharding] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    transforms: ModuleTransforms = field(default_factory=ModuleTransforms)
    cut: StageCut | None = None
    copy_input: CopyToTensorRanks | None = None
    stacks: list[Blocks] = field(default_factory=list)
    block_outputs: BlockOutputs | None = None
    streams: RandomStreams | None = None

    def begin_micro_batch(self, step: int, number: int) -> None:
        """Begin micro-batch ``number`` in the batch of a ``step``: the next forwards belong to it."""
        if self.streams is not None:
            self.streams.begin_micro_batch(step, number)
