"""What the ranks agree on around an update. Every method but the constructor is a collective."""

import math
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partita.errors import PartitaError
from partita.optim.loss_scale import LossScale
from partita.sharding.reducer import GradientReducer
from partita.sharding.runtime import Runtime
from partita.sharding.unit import Member

# What precedes the flags in the message before an update: waves, digest of what was written, scale of the gradients.
HEADER = "<qqd"
NO_SCALE, MANY_SCALES = 0.0, math.nan


@dataclass(frozen=True)
class Agreed:
    """What the ranks told each other before an update.

    ``waves``: the most that a rank has begun; ``leftovers``: for each bucket, whether a rank has gradients that no wave
    took; ``used``: ids of the members that got a gradient on any rank; ``scale``: what gradients are multiplied by.
    """

    waves: int
    leftovers: list[bool]
    used: set[int]
    scale: float


class Consensus:
    """Brings the ranks to the same view of a batch. ``step`` is the number of the update, for messages."""

    def __init__(self, runtime: Runtime, loss_scale: LossScale) -> None:
        self._group, self._is_first = runtime.gradient_group, runtime.is_first_of_part
        self._device = runtime.executor.device
        self._reducer: GradientReducer = runtime.reducer
        self._written = runtime.written
        self._loss_scale = loss_scale
        self._told_unscaled = False

    @property
    def members(self) -> list[Member]:
        """Whose gradients the ranks agree on, in one order."""
        return [member for bucket in self._reducer.buckets for member in bucket.members]

    def before_update(self, step: int, call: str) -> Agreed:
        """Exchange which parameters were used and what is left to reduce, in one small message, at ``call``.

        Raises:
            PartitaError: the gradients have several loss scales, or the ranks wrote different values into parameters.
        """
        reducer, members = self._reducer, self.members
        used = [id(member) in bucket.used for bucket in reducer.buckets for member in bucket.members]
        header = struct.pack(HEADER, reducer.waves, self._written.digest, self._own_scale)
        message = header + bytes([*reducer.leftovers(), *used])
        every = self._group.exchange(torch.frombuffer(bytearray(message), dtype=torch.uint8), call).wait()
        rows = [bytes(row.tolist()) for row in every]
        waves, digests, scales = zip(*(struct.unpack_from(HEADER, row) for row in rows), strict=True)
        if any(digests):
            self.compare_written(step)
        flags = [any(column) for column in zip(*(row[struct.calcsize(HEADER) :] for row in rows), strict=True)]
        num_buckets = len(reducer.buckets)
        taken = {id(member) for member, flag in zip(members, flags[num_buckets:], strict=True) if flag}
        return Agreed(max(waves), flags[:num_buckets], taken, self._one_scale(scales, step))

    def gradient_scale(self, step: int) -> float:
        """What the gradients collected so far are multiplied by.

        Raises:
            PartitaError: not all of them by the same factor.
        """
        self._reducer.join()  # another rank's backward may wait for this one in a reduction
        return self._one_scale(self._group.exchange_objects(self._own_scale, "engine.gradient"), step)

    @property
    def _own_scale(self) -> float:
        """The factor of this rank's gradients."""
        scales = self._reducer.scales
        return MANY_SCALES if len(scales) > 1 else next(iter(scales), NO_SCALE)

    def _one_scale(self, scales: Sequence[float], step: int) -> float:
        """The factor of all ranks' gradients: its own, another engine's, or 1 where nobody scaled the loss."""
        found = {scale for scale in scales if scale != NO_SCALE}
        if len(found) > 1 or any(map(math.isnan, found)):
            raise PartitaError(
                f"step {step}: the gradients of this batch came from losses with several loss scales (by "
                "engine.backward, plain loss.backward(), or engine.backward of another engine): call backward of one "
                "engine for all of them, or drop what came from the others by engine.zero_grad()"
            )
        scale = found.pop() if found else self._loss_scale.value
        if scale == 1.0 != self._loss_scale.value and not self._told_unscaled:
            self._told_unscaled = True
            warnings.warn(
                "loss.backward() was called where engine.backward(loss) multiplies by the loss scale "
                f"({self._loss_scale.value:g}): gradients too small for fp16 are lost; call engine.backward(loss)",
                stacklevel=7,
            )
        return scale

    def compare_written(self, step: int) -> None:
        """See that all ranks wrote the same values into parameters.

        Raises:
            PartitaError: they did not.
        """
        written = self._written
        every = self._group.exchange_objects((written.names, written.digest), "what was written")
        written.agreed()
        for rank, (names, digest) in enumerate(every):
            first, expected = every[0]
            if digest != expected:
                name = next(iter({*first} ^ {*names}), (names or first)[0])
                raise PartitaError(
                    f"step {step}: rank {rank} wrote other values into parameters than rank 0, or into "
                    f"others (of {len({*first, *names})}: '{name}'); write the same on every rank, or write inside "
                    "`with engine.gathered(..., modify=True)`, where rank 0's values become those of all"
                )

    def norm(self, squares: Sequence[Tensor]) -> float:
        """The root of the sum of all parts' ``squares`` (of scaled gradients), added up in rank order; not finite where
        one of them is not.
        """
        squares = squares if self._is_first else ()
        if len({square.device for square in squares}) > 1:
            squares = [square.cpu() for square in squares]
        mine = torch.stack(list(squares)).sum() if squares else torch.zeros((), dtype=torch.float64, device="cpu")
        every = self._group.exchange(mine.cpu().view(1), "the norm of engine.step").wait()
        total = 0.0
        for square in every.view(-1).tolist():
            total += square
        return math.sqrt(total) if total >= 0 else math.nan

    def sums(self, of_part: Tensor, of_rank: Tensor) -> list[float]:
        """The sums of these numbers, one after the other: over all parts, and over all ranks."""
        of_part = of_part if self._is_first else torch.zeros_like(of_part)
        own = torch.cat([part.to(self._device) for part in (of_part, of_rank)])
        found: list[float] = self._group.all_reduce(own).tolist()
        return found

    def culprit(self, number: int) -> tuple[int, list[str]]:
        """The least of all ranks' ``number``, and the ranks whose loss, or a gradient they sent, was not finite."""
        every = self._group.exchange_objects((number, self._reducer.suspect), "engine.step")
        return min(number for number, _ in every), [str(rank) for rank, (_, suspect) in enumerate(every) if suspect]
