"""Memory that reductions of gradients pass through: lent for one reduction at a time, and never allocated in a step."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from partita.memory import accelerator
from partita.memory.allocate import over
from partita.memory.buffer_pool import BufferPool, Slot
from partita.memory.ledger import Ledger
from partita.memory.streams import Event
from partita.plan.residence import Tier
from partita.plan.slots import RECEIVING, SENDING, SUMMED, PlannedPool, bucket_pools
from partita.sharding.buckets import Bucket
from partita.sharding.gradient_buffer import PooledBuffer


class GradientPools:
    """Three kinds of slots: to collect gradients in, to receive in, and for sums that rest nowhere."""

    def __init__(self, buckets: Sequence[Bucket], ledger: Ledger, device: torch.device) -> None:
        self._in_pieces = accelerator.is_host(device)

        def pool(planned: PlannedPool, tier: Tier = Tier.DEVICE) -> BufferPool:
            return BufferPool("buckets", planned, ledger, device, tier=tier)

        planned = bucket_pools([bucket.layout.planned for bucket in buckets], in_pieces=self._in_pieces)
        self._collecting = pool(planned.sending)
        self._receiving = pool(planned.receiving)
        self._sums = {tier: pool(of_tier, tier) for tier, of_tier in planned.summed.items()}
        self._scratch_bytes = {id(bucket): self._bytes_to_receive(bucket) for bucket in buckets}

    def __iter__(self) -> Iterator[BufferPool]:
        """All pools."""
        return iter((self._collecting, self._receiving, *self._sums.values()))

    def provide(self, bucket: Bucket) -> None:
        """Have slots for one more bucket."""
        num_bytes = self._scratch_bytes[id(bucket)] = self._bytes_to_receive(bucket)
        if not bucket.moves:
            return
        if num_bytes:
            self._receiving.provide(num_bytes, RECEIVING)
        if bucket.passes:
            self._collecting.provide(bucket.num_bytes, SENDING)
        if bucket.sums_tier is not None:
            self._sums[bucket.sums_tier].provide(bucket.shard_bytes, SUMMED)

    def _bytes_to_receive(self, bucket: Bucket) -> int:
        return bucket.layout.planned.scratch_bytes(in_pieces=self._in_pieces)

    # ---------------------------------------------------------------- collecting

    def lend(self, bucket: Bucket) -> None:
        """Give a bucket a slot to collect in, where it needs one and has none."""
        if isinstance(bucket.buffer, PooledBuffer) and bucket.buffer.full is None:
            bucket.buffer.borrow(self._collecting.borrow(bucket.num_bytes))

    def take_back(self, slot: Slot, last_use: Event) -> None:
        """A slot that a bucket has collected in is free once ``last_use`` has passed."""
        self._collecting.give_back(slot, last_use)

    # ----------------------------------------------------------------- receiving

    def scratch(self, buckets: Sequence[Bucket]) -> Slot | None:
        """A slot for what the largest of these buckets receives; None where none receives anything."""
        num_bytes = max((self._scratch_bytes[id(bucket)] for bucket in buckets), default=0)
        return self._receiving.borrow(num_bytes) if num_bytes else None

    def in_slot(self, slot: Slot | None, bucket: Bucket) -> Tensor | None:
        """The memory of such a slot, as one bucket receives in it."""
        if slot is None or not (num_bytes := self._scratch_bytes[id(bucket)]):
            return None
        return over(slot.storage, bucket.dtype, num_bytes // bucket.dtype.itemsize)

    def give_back_scratch(self, slot: Slot | None, last_use: Event) -> None:
        """Such a slot is free once ``last_use`` has passed."""
        if slot is not None:
            self._receiving.give_back(slot, last_use)

    # ---------------------------------------------------------------------- sums

    def for_sum(self, bucket: Bucket) -> Slot | None:
        """A slot for the bucket's sum; None where that rests."""
        return None if bucket.sums_tier is None else self._sums[bucket.sums_tier].borrow(bucket.shard_bytes)

    def give_back_sum(self, slot: Slot, bucket: Bucket, used: Event) -> None:
        """The sum is used up once ``used`` has passed."""
        assert bucket.sums_tier is not None
        self._sums[bucket.sums_tier].give_back(slot, used)
