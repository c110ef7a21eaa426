"""The master weights of a segment: the values that the optimizer updates."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from partita.kernels.quantize import join, split
from partita.memory.tiers import Kept, Lease, StateMemory
from partita.plan.residence import SPLIT, Residence
from partita.plan.span import Span
from partita.planner.dtypes import dtype_of


class MasterWeights:
    """This rank's part of a segment's master weights.

    They are the parameters at rest (or this rank's part of them), or a state of their own. A split state has the low
    halves of fp32 values whose high halves are the bf16 parameters at rest.

    Args:
        state: where they are kept.
        residence: the row's.
        spans: of the parameters, with offsets in ``state``.
    """

    def __init__(self, state: Kept, residence: Residence, spans: Sequence[Span]) -> None:
        self.state = state
        self.splits = residence.encoding == SPLIT
        self._spans = spans

    @classmethod
    def apart(cls, values: Tensor, residence: Residence, spans: Sequence[Span], memory: StateMemory) -> "MasterWeights":
        """A state of their own, with the ``values`` of this rank's part, in fp32 or as the parameters are."""
        state = memory.keep("master", values.numel(), dtype_of(residence.encoding), residence.tier)
        if residence.encoding == SPLIT:
            values = split(values)[1] if values.dtype == torch.float32 else torch.zeros_like(values)
        state.store(values)
        return cls(state, residence, spans)

    def lend(self) -> Lease:
        """The weights in memory."""
        return self.state.lend()

    def joined(self, parameters: Tensor, held: Tensor) -> Tensor:
        """The weights that ``held`` has, or, with the same elements of the ``parameters``, has the low halves of."""
        return join(parameters.to(held.device), held) if self.splits else held

    def set(self, values: Tensor, names: AbstractSet[str], before: Tensor | None = None) -> None:
        """Overwrite the weights of the named parameters.

        Args:
            values: this rank's part of all parameters: in the dtype in compute, or, to be stored as they are, in fp32.
            before: the parameters without what was written, where they are known: where they are equal to ``values``,
                low halves stay.
        """
        lease = self.lend()
        master = lease.wait()
        values = values.to(master.device)
        for span in self._spans:
            if span.fqn in names:
                place = slice(span.offset, span.offset + span.num_elements)
                if self.splits and values.dtype == torch.float32:
                    master[place] = split(values[place])[1]
                elif self.splits:
                    same = None if before is None else before[place].to(values.device) == values[place]
                    master[place] = 0 if same is None else master[place].where(same, torch.zeros_like(master[place]))
                else:  # where a value is the master's own, rounded, the master keeps its digits
                    own = master[place].to(values.dtype) == values[place]
                    master[place] = torch.where(own, master[place], values[place].to(master))
        lease.end(changed=True)
