"""This rank's shard of a segment's weights, in the precision in which they are updated: reading and writing it.

The shard is that of the layout, ``[shard_elements]``, whatever the row shards: at stage 0, too, each rank reads and
writes its own shard. Call these functions between two updates.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from partita.kernels.quantize import split
from partita.sharding.interpreter import Interpreter
from partita.sharding.runtime import Runtime
from partita.sharding.segment import Segment
from partita.table.residence import FP32, Residence, Tier
from partita.table.steps import steps


@contextmanager
def weights_read(segment: Segment) -> Iterator[Tensor]:
    """Yield this rank's shard of a segment's weights, ``[shard_elements]``: master weights if there are any.

    It may be the memory that stores them.
    """
    params = segment.stored.lease()
    separate = None if segment.master_is_parameter else segment.master
    master = separate.lease() if separate is not None else None
    try:
        weights = _shard(segment, params.wait())
        if separate is not None and master is not None:
            weights = separate.joined(weights, _shard(segment, master.wait()))
        yield weights
    finally:
        params.end(changed=False)
        if master is not None:
            master.end(changed=False)


def _shard(segment: Segment, values: Tensor) -> Tensor:
    """Return this rank's shard of ``values``, which may contain several shards."""
    shards = values.view(-1, segment.layout.shard_elements)
    return shards[segment.shard_index % len(shards)]


def write_weights(runtime: Runtime, segment: Segment, shard: Tensor) -> None:
    """Replace the weights of a segment that trains, on all ranks, by each rank's fp32 shard, ``[shard_elements]``.

    The parameters get the values rounded as an update rounds them. A collective; call ``runtime.rewritten()`` after the
    last segment.
    """
    assert segment.master is not None
    row, master = segment.plan, segment.master
    values = _gathered(runtime, segment, shard.to(runtime.device, torch.float32))
    if master.splits:
        high, low = split(values)
        master.state.store(low)
        updated = replace(row.master, encoding=segment.layout.encoding, tier=Tier.DEVICE)
        if steps(updated, row.param_stored, segment.mesh):
            runtime.publisher.deliver(segment, high, updated)
        else:
            segment.stored.store(high)
        return
    lease = master.lease()
    lease.wait().copy_(values)
    runtime.publisher.deliver(segment, lease.tensor, row.master, exact=True)
    lease.end(changed=True)


def _gathered(runtime: Runtime, segment: Segment, shard: Tensor) -> Tensor:
    """Return the values that this rank's master weights consist of, flat: one shard or several."""
    own = Residence(segment.plan.gradient_shard_axes, (), FP32)
    stored = replace(own, shard_axes=segment.plan.master.shard_axes)
    operations = steps(own, stored, segment.mesh)
    if not operations:
        return shard
    values = shard.new_empty(segment.layout.padded // segment.planned.num_shards(stored))
    Interpreter(runtime.collectives).run(operations, shard, values)
    return values
