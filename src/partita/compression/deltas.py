"""Parameter deltas: ranks tell each other how far updated values are from what all have stored, in codes.

Every rank has the same stored values, so what the codes of one delta lose is part of the next one: the error feedback
needs no memory of its own.
"""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from partita.comm.group import Group
from partita.compression.quantized import Quantized
from partita.kernels import codec as kernels
from partita.kernels.chunks import chunks
from partita.kernels.codecs import Codec
from partita.kernels.quantize import nearest_bf16
from partita.plan.formats import FULL
from partita.plan.planned import PlannedSegment
from partita.plan.residence import FP32
from partita.plan.steps import AllGather, in_formats
from partita.sharding.publish import PublishCall, RunnablePublish
from partita.sharding.segment import Segment


@dataclass(frozen=True)
class DeltaPlan(RunnablePublish):
    """Publishes codes of the deltas."""

    codec: Codec = field(kw_only=True)

    @classmethod
    def of(cls, segment: PlannedSegment, codec: Codec) -> "DeltaPlan":
        """Return the plan of one segment."""
        operations = in_formats(segment.publication, FULL, Quantized(codec))
        return cls(operations, needs_master=True, codec=codec)

    def scratch_bytes(self, segment: PlannedSegment) -> int:
        """Return the bytes of the codes of all parts, with room for one rank's values in fp32."""
        own, stored = (
            residence.num_elements(segment.layout.padded, segment.mesh)
            for residence in (segment.row.master, segment.row.param_rest)
        )
        return self.codec.num_bytes(stored) + FP32.num_bytes(own)

    def run(self, segment: Segment, master: Tensor, call: PublishCall) -> None:
        assert call.scratch is not None
        gather = next(op for op in self.operations if isinstance(op, AllGather))
        lease = segment.rest.lend()
        group = call.interpreter.group(gather.axes)
        add_deltas(group, self.codec, master.to(call.interpreter.device), lease.wait(), call.scratch)
        lease.end(changed=True)


def add_deltas(group: Group, codec: Codec, updated: Tensor, stored: Tensor, scratch: Tensor) -> None:
    """Bring ``stored`` ``[size * n]``, the same on all ranks, nearer to what each has ``updated`` ``[n]``.

    Args:
        scratch: memory for the codes of ``stored``, and for ``n`` values in fp32.
    """
    decode = partial(kernels.decode, codec, threads=torch.get_num_threads())
    parts, num_codes = stored.view(group.size, -1), codec.num_bytes(stored.numel())
    scratch = scratch.view(torch.uint8)
    codes = scratch[:num_codes].view(group.size, -1)
    delta = scratch[num_codes : num_codes + updated.numel() * 4].view(torch.float32)
    torch.sub(updated, parts[group.index], out=delta)
    kernels.encode(codec, delta, codes[group.index], threads=torch.get_num_threads())
    group.all_gather(codes.view(-1), codes[group.index], "parameters").wait()
    for rank, part in enumerate(parts):
        if part.dtype == torch.float32:
            decode(codes[rank], part, add=True)
        else:
            decode(codes[rank], delta)
            delta.add_(part)
            for at in chunks(delta):  # rounded as the optimizer's kernels round masters
                part[at].copy_(nearest_bf16(delta[at]) if part.dtype == torch.bfloat16 else delta[at])
