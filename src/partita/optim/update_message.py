"""The message of one rank before an update: what the ranks that reduce gradients together must agree on."""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# The flag of a parameter: its gradient arrived, or did and was dropped by the user.
ARRIVED, DROPPED = 1, 2
# Loss scales of ranks without a gradient, and of ranks with gradients of several scales.
NO_SCALE, MANY_SCALES = 0.0, math.nan

# Two integers with several numbers each, and the loss scale. The layout's traffic counts these three words.
_HEADER = struct.Struct("<qqd")
_DROPS = 1 << 32  # above the number of reduce passes
# Above the digest of written values: two flags and the checksum of the batch.
_BUFFERS = 1 << 32
_HOOKS = _BUFFERS << 1
_BATCH = _HOOKS << 1


@dataclass(frozen=True, kw_only=True)
class UpdateMessage:
    """One rank's view of a batch before the update.

    Attributes:
        num_passes: reduce passes that the rank has ended.
        num_drops: batches whose gradients the rank's user has dropped from ``.grad``.
        written: the digest of the values that were written into parameters, below 2^32; 0 for none.
        batch: the checksum of the forwards' arguments, below 2^24; 0 if there is none.
        scale: the loss scale of the gradients, :data:`NO_SCALE` or :data:`MANY_SCALES`.
        has_changed_buffers: a buffer that is not broadcast has changed.
        has_hooks: the user has hooks on the optimizer's step.
        leftovers: for each bucket, 1 if it has gradients that no reduce pass has reduced.
        flags: for each parameter, :data:`ARRIVED`, :data:`DROPPED` or 0.
    """

    num_passes: int
    num_drops: int
    written: int
    batch: int
    scale: float
    has_changed_buffers: bool
    has_hooks: bool
    leftovers: Sequence[int]
    flags: Sequence[int]

    def pack(self) -> Tensor:
        """Return the message as bytes."""
        changes = self.written + _BUFFERS * self.has_changed_buffers + _HOOKS * self.has_hooks + _BATCH * self.batch
        header = _HEADER.pack(self.num_passes + _DROPS * self.num_drops, changes, self.scale)
        return torch.frombuffer(bytearray(header + bytes([*self.leftovers, *self.flags])), dtype=torch.uint8)

    @classmethod
    def unpack(cls, row: Tensor, num_buckets: int) -> "UpdateMessage":
        """Return the message that :meth:`pack` has packed."""
        content = bytes(row.tolist())
        counts, changes, scale = _HEADER.unpack_from(content)
        body = content[_HEADER.size :]
        return cls(
            num_passes=counts % _DROPS,
            num_drops=counts // _DROPS,
            written=changes % _BUFFERS,
            batch=changes // _BATCH,
            scale=scale,
            has_changed_buffers=bool(changes & _BUFFERS),
            has_hooks=bool(changes & _HOOKS),
            leftovers=body[:num_buckets],
            flags=body[num_buckets:],
        )
