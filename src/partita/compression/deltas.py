"""Parameter deltas: ranks exchange the quantized differences between updated and stored parameters.

Every rank stores the same values. So the quantization error of one delta is part of the next delta, and error feedback
needs no additional memory.
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
from partita.sharding.publish import PublishCall, RunnablePublish
from partita.sharding.segment import Segment
from partita.table.formats import FULL
from partita.table.planned import PlannedSegment
from partita.table.residence import FP32
from partita.table.steps import AllGather, in_formats


@dataclass(frozen=True)
class DeltaPlan(RunnablePublish):
    """Plan that publishes quantized deltas."""

    codec: Codec = field(kw_only=True)

    @classmethod
    def of(cls, segment: PlannedSegment, codec: Codec) -> "DeltaPlan":
        """Return the plan of one segment."""
        operations = in_formats(segment.publication, FULL, Quantized(codec))
        return cls(operations, needs_master=True, codec=codec)

    def scratch_bytes(self, segment: PlannedSegment) -> int:
        """Return the bytes of the codes of all shards, and of one rank's shard in fp32."""
        updated, stored = (
            residence.num_elements(segment.layout.padded, segment.mesh)
            for residence in (segment.row.master, segment.row.param_stored)
        )
        return self.codec.num_bytes(stored) + FP32.num_bytes(updated)

    def run(self, segment: Segment, master: Tensor, call: PublishCall) -> None:
        assert call.scratch is not None
        gather = next(op for op in self.operations if isinstance(op, AllGather))
        lease = segment.stored.lease()
        group = call.interpreter.group(gather.axes)
        add_deltas(group, self.codec, master.to(call.interpreter.device), lease.wait(), call.scratch)
        lease.end(changed=True)


def add_deltas(group: Group, codec: Codec, updated: Tensor, stored: Tensor, scratch: Tensor) -> None:
    """Add the quantized deltas of all ranks to ``stored``, which is the same on all ranks.

    Args:
        updated: this rank's updated shard, ``[n]``.
        stored: the stored parameters, ``[size * n]``.
        scratch: memory for the codes of ``stored``, and for ``n`` values in fp32.
    """
    decode = partial(kernels.decode, codec, threads=torch.get_num_threads())
    shards, num_codes = stored.view(group.size, -1), codec.num_bytes(stored.numel())
    scratch = scratch.view(torch.uint8)
    codes = scratch[:num_codes].view(group.size, -1)
    delta = scratch[num_codes : num_codes + updated.numel() * 4].view(torch.float32)
    torch.sub(updated, shards[group.index], out=delta)
    kernels.encode(codec, delta, codes[group.index], threads=torch.get_num_threads())
    group.all_gather(codes.view(-1), codes[group.index], "parameters").wait()
    for rank, shard in enumerate(shards):
        if shard.dtype == torch.float32:
            decode(codes[rank], shard, add=True)
        else:
            decode(codes[rank], delta)
            delta.add_(shard)
            for at in chunks(delta):  # rounded as the optimizer's kernels round master weights
                shard[at].copy_(nearest_bf16(delta[at]) if shard.dtype == torch.bfloat16 else delta[at])
