"""Agreement of the ranks before an update: flags, the gradient norm, the loss scale, and equal parameters.

Sources: Micikevicius et al., "Mixed Precision Training", 2018, section 3.2 for the loss scale; the dynamic rule is
that of NVIDIA's Apex.
"""

import logging
import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from partita.comm.collective_errors import shared_errors
from partita.config import schema
from partita.errors import PartitaError
from partita.memory import accelerator
from partita.optim.update_message import ARRIVED, DROPPED, MANY_SCALES, NO_SCALE, UpdateMessage
from partita.sharding.finite import NUM_COMPARED
from partita.sharding.parameter import Member
from partita.sharding.reducer import GradientReducer
from partita.sharding.runtime import Runtime
from partita.sharding.segment import Segment
from partita.sharding.unit import Unit
from partita.table.mesh_shape import AXES, expand

_log = logging.getLogger("partita")

SMALLEST = 2.0**-10
FACTOR = 2.0


class LossScale:
    """The loss scale: the loss is multiplied by ``value`` before backward, gradients are divided by it before the
    update.

    A dynamic scale halves when a gradient is not finite and doubles after ``loss_scale_window`` good steps.

    Args:
        section: its ``loss_scale`` is ``"dynamic"`` or a fixed factor.
        needed: True if the compute dtype has fp16's range; otherwise the scale is always 1.
    """

    def __init__(self, section: schema.Precision, needed: bool) -> None:
        self.dynamic = needed and section.loss_scale == "dynamic"
        setting = section.initial_loss_scale if section.loss_scale == "dynamic" else section.loss_scale
        self.value = setting if needed else 1.0
        self._largest = math.inf
        self._window = section.loss_scale_window
        self._good_steps = 0

    def carry(self, loss: Tensor) -> None:
        """Lower the scale to the largest one in the range of the loss's dtype. In fp16, 2**16 is infinite.

        Raises:
            PartitaError: the scale is fixed, and larger.
        """
        if self.value == 1.0:
            return
        dtype = _narrowest(loss)
        largest = FACTOR ** math.floor(math.log2(torch.finfo(dtype).max))
        self._largest = min(self._largest, largest)
        if self.value <= largest:
            return
        if not self.dynamic:
            raise PartitaError(
                f"precision.loss_scale: {self.value:g} is out of the range of the loss, which was computed in {dtype}; "
                f"set it to {largest:g} or less, or compute the loss in fp32 (logits.float())"
            )
        self.value = largest

    def succeeded(self) -> None:
        """Count a step with finite gradients; a dynamic scale may double."""
        self._good_steps += 1
        if self.dynamic and self._good_steps % self._window == 0:
            self.value = min(self.value * FACTOR, self._largest)

    def counters(self) -> dict[str, float]:
        """Return a dynamic scale and the number of steps since the last non-finite gradient, for a checkpoint."""
        return {"dynamic_loss_scale": self.value, "good_steps": self._good_steps} if self.dynamic else {}

    def restore(self, counters: dict[str, float]) -> None:
        """Continue from an earlier result of :meth:`counters`, if this scale and that one are dynamic."""
        earlier = counters.get("loss_scale", 1.0)  # earlier versions saved every scale; losses without one have 1
        scale = counters.get("dynamic_loss_scale", None if earlier == 1.0 else earlier)
        if self.dynamic and scale is not None:
            self.value = float(scale)
            self._good_steps = int(counters["good_steps"])

    def overflowed(self, culprit: str) -> None:
        """Lower a dynamic scale after a non-finite gradient.

        Raises:
            PartitaError: the scale is at its minimum; the message names the ``culprit``.
        """
        self._good_steps = 0
        if not self.dynamic:
            return
        if self.value <= SMALLEST:
            raise PartitaError(
                f"the loss scale is at its minimum ({SMALLEST:g}) and gradients are still not finite: {culprit}. Look "
                "for a division by zero or a too large learning rate, or use precision.compute: bf16"
            )
        self.value /= FACTOR


def _narrowest(loss: Tensor) -> torch.dtype:
    """Return the dtype of smallest range among a loss and the scalars that it was computed from by casts or scaling."""
    found, (node, index) = loss.dtype, (loss.grad_fn, 0)
    while (metadata := getattr(node, "_input_metadata", None)) and not metadata[index].shape:
        found = min(found, metadata[index].dtype, key=lambda dtype: torch.finfo(dtype).max)
        before = [(other, number) for other, number in node.next_functions if other is not None] if node else []
        if len(before) != 1:
            break
        node, index = before[0]
    return found


@dataclass(frozen=True)
class Agreed:
    """The messages of all ranks before an update, combined.

    Attributes:
        num_passes: the maximum number of reduce passes that a rank has ended.
        leftovers: for each bucket, True if a rank has gradients that no reduce pass has reduced.
        used: ids of the members that got a gradient on any rank, and whose gradient was not dropped.
        dropped: ids of the members whose gradient the user has dropped.
        scales: the loss scales of the ranks' gradients.
        has_written: True if a rank has written into parameters.
        has_changed_buffers: True if a rank has changed a buffer that is not broadcast.
        has_hooks: True if a rank's user has hooks on the optimizer's step.
    """

    num_passes: int
    leftovers: list[bool]
    used: set[int]
    dropped: set[int]
    scales: tuple[float, ...]
    has_written: bool
    has_changed_buffers: bool
    has_hooks: bool


@dataclass(frozen=True)
class Culprit:
    """The cause of non-finite gradients.

    Attributes:
        name: the name of a parameter.
        ranks: the ranks whose loss or gradient was not finite.
        arguments: a message about the first forward argument with such values, or an empty string.
    """

    name: str
    ranks: list[str]
    arguments: str


class Consensus:
    """Brings the ranks to the same view of a batch.

    Attributes:
        num_drops: the number of batches whose gradients this rank's user has dropped from ``.grad``.

    ``step`` is the number of the update, ``call`` the name of the user's call, for messages.
    """

    def __init__(self, runtime: Runtime, loss_scale: LossScale) -> None:
        self._group = runtime.gradient_group
        self._collectives = runtime.collectives
        self._all_ranks = runtime.collectives.all_ranks
        # The ranks that have the same parameters, by the axes over which gradients are summed.
        axes = [runtime.row.summed_axes, *(member.segment.plan.summed_axes for _, member in runtime.members())]
        self._equal_ranks = {each: runtime.collectives.group(each).ranks for each in dict.fromkeys(axes)}
        self._axes_of = {member.fqn: member.segment.plan.summed_axes for _, member in runtime.members()}
        self._device = runtime.device
        self._reducer: GradientReducer = runtime.reducer
        self._written = runtime.written
        self._buffers = runtime.buffers
        self._arguments = runtime.arguments
        self._loss_scale = loss_scale
        self.num_drops = 0
        self._warned_unscaled = False
        self._num_same_batches: int | None = 0  # batches so far that were the same on all ranks; None: one was not
        shape, row = runtime.collectives.mesh.shape, runtime.row
        of_replica = tuple(axis for axis in expand(AXES) if axis not in row.separate_axes)
        # Rank numbers in the mesh, which are their order in the group of all ranks.
        self._replicas = [sorted(ranks) for ranks in shape.groups(of_replica)]

    @property
    def members(self) -> list[Member]:
        """The parameters that train, in one order."""
        return [member for bucket in self._reducer.buckets for member in bucket.members]

    def before_update(self, call: str, *, has_hooks: bool = False) -> Agreed:
        """Exchange in one small message which parameters were used and which buckets are still to be reduced.

        It is exchanged among the ranks that reduce together; ranks with copies of a parameter also exchange its use.

        Args:
            has_hooks: True if this rank's user has hooks on the optimizer's step.

        Raises:
            PartitaError: some ranks have dropped gradients that others have not.
        """
        reducer, members = self._reducer, self.members
        dropped = set(map(id, reducer.dropped_members))
        message = UpdateMessage(
            num_passes=reducer.num_passes,
            num_drops=self.num_drops,
            written=self._written.digest,
            batch=self._arguments.checksum,
            scale=self._own_scale,
            has_changed_buffers=self._buffers.has_changed(),
            has_hooks=has_hooks,
            leftovers=reducer.leftovers(),
            flags=[
                DROPPED if id(member) in dropped else ARRIVED if id(member) in bucket.arrivals.used else 0
                for bucket in reducer.buckets
                for member in bucket.members
            ],
        )
        rows = self._group.exchange(message.pack(), call).wait()
        messages = [UpdateMessage.unpack(row, len(reducer.buckets)) for row in rows]
        self._compare_batches([each.batch for each in messages])
        flags = list(zip(*(each.flags for each in messages), strict=True))
        all_used = {id(member) for member, column in zip(members, flags, strict=True) if ARRIVED in column}
        all_used = self._used_by_copies(all_used, call)
        all_dropped = {id(member) for member, column in zip(members, flags, strict=True) if DROPPED in column}
        some = [member.fqn for member in members if id(member) in all_used & all_dropped]
        if some or len({each.num_drops for each in messages}) > 1:
            what = f"the gradient of '{some[0]}'" if some else "the gradients of a batch"
            raise PartitaError(
                f"{call}: some ranks have dropped {what} (.grad = None, zero_grad()), and others have not: drop the "
                "same gradients on all ranks"
            )
        return Agreed(
            num_passes=max(each.num_passes for each in messages),
            leftovers=[any(column) for column in zip(*(each.leftovers for each in messages), strict=True)],
            used=all_used,
            dropped=all_dropped,
            scales=tuple(each.scale for each in messages),
            has_written=any(each.written for each in messages),
            has_changed_buffers=any(each.has_changed_buffers for each in messages),
            has_hooks=any(each.has_hooks for each in messages),
        )

    def _compare_batches(self, checksums: Sequence[int]) -> None:
        """Warn, once, if all ranks have got the same batches from the start."""
        if self._num_same_batches is None or not checksums[0] or len(checksums) == 1:
            return
        self._num_same_batches = self._num_same_batches + 1 if len({*checksums}) == 1 else None
        if self._num_same_batches == NUM_COMPARED and self._group.index == 0:
            _log.warning(
                "the %d data ranks got the same samples in the first %d batches, so that each computes the same "
                "gradients: give each rank samples of its own, by DistributedSampler(data, "
                "num_replicas=engine.mesh.size('data'), rank=engine.mesh.coordinate('data'))",
                len(checksums),
                NUM_COMPARED,
            )

    def _used_by_copies(self, used: set[int], call: str) -> set[int]:
        """Add the members to ``used`` that ranks with copies have used, and return it."""
        by_axes = defaultdict[tuple[str, ...], list[Member]](list)
        for member in self.members:
            by_axes[member.segment.plan.copies.axes].append(member)
        for axes in sorted(axes for axes in by_axes if axes):
            members = sorted(by_axes[axes], key=lambda member: member.fqn)
            message = torch.tensor([id(member) in used for member in members], dtype=torch.uint8, device="cpu")
            every = self._collectives.group(axes).exchange(message, call).wait()
            used |= {id(member) for member, flag in zip(members, every.any(0).tolist(), strict=True) if flag}
        return used

    def gradient_scale(self, step: int) -> float:
        """Return the loss scale of the gradients collected so far.

        Raises:
            PartitaError: they have several loss scales.
        """
        self._reducer.join()  # another rank's backward may wait for this rank in a reduction
        return self._one_scale(self._all_ranks.exchange_objects(self._own_scale, "engine.gradient"), step)

    @property
    def _own_scale(self) -> float:
        """The loss scale of this rank's gradients."""
        scales = self._reducer.scales
        return MANY_SCALES if len(scales) > 1 else next(iter(scales), NO_SCALE)

    def _one_scale(self, scales: Sequence[float], step: int) -> float:
        """Return the loss scale of all ranks' gradients: this engine's, another engine's, or 1 if the loss was not
        scaled.
        """
        found = {scale for scale in scales if scale != NO_SCALE}
        if len(found) > 1 or any(map(math.isnan, found)):
            raise PartitaError(
                f"step {step}: the gradients of this batch came from losses with several loss scales (by "
                "engine.backward, plain loss.backward(), or engine.backward of another engine): call backward of one "
                "engine for all of them, or drop what came from the others by engine.zero_grad()"
            )
        scale = found.pop() if found else self._loss_scale.value
        if scale == 1.0 != self._loss_scale.value and not self._warned_unscaled:
            self._warned_unscaled = True
            warnings.warn(
                "loss.backward() was called instead of engine.backward(loss), which multiplies by the loss scale "
                f"({self._loss_scale.value:g}): gradients too small for fp16 are lost; call engine.backward(loss)",
                stacklevel=8,
            )
        return scale

    def compare_written(self, step: int) -> None:
        """Check that ranks with the same parameters wrote the same values into them.

        Raises:
            PartitaError: on all ranks: they did not.
        """
        written = self._written
        own = {axes: (ranks, dict[str, int]()) for axes, ranks in self._equal_ranks.items()}
        for name, value in written.sums.items():
            own[self._axes_of[name]][1][name] = value
        every = self._all_ranks.exchange_objects(own, "a comparison of written values")
        written.agreed()
        for rank, axes in ((rank, axes) for rank, of_rank in enumerate(every) for axes in of_rank):
            equal_ranks, sums = every[rank][axes]
            _, first = every[equal_ranks[0]][axes]
            if differing := [name for name in first | sums if first.get(name) != sums.get(name)]:
                raise PartitaError(
                    f"step {step}: rank {rank} wrote other values into parameters than rank {equal_ranks[0]}, or into "
                    f"other parameters ('{differing[0]}', of {len(first | sums)}); write the same on every rank (in "
                    "forward, nothing that depends on a rank's own samples, as nn.Embedding(max_norm=) does), or write "
                    "inside `with engine.gathered(..., modify=True)`, which broadcasts rank 0's values"
                )

    def norm(self, squared_norms: Sequence[Tensor], agreed: Agreed, step: int) -> tuple[float, float]:
        """Return the norm of all ranks' gradients, still scaled, and their loss scale.

        Replicas that train separately have separate norms; if one of them is not finite, none is. The norm is rounded
        to fp32: the float64 sums depend in their last digits on how the gradients are sharded.

        Args:
            squared_norms: those of this rank's gradients, without those that another rank measures, too.

        Raises:
            PartitaError: on all ranks: the gradients have several loss scales, or the ranks wrote different values into
                parameters.
        """
        call = "the norm of engine.step"
        if len({each.device for each in squared_norms}) > 1:
            squared_norms = _read_all(squared_norms, partial(self._all_ranks.read, call=call))
        mine = (
            torch.stack(list(squared_norms)).sum()
            if squared_norms
            else torch.zeros((), dtype=torch.float64, device="cpu")
        )
        scales = set(agreed.scales) - {NO_SCALE}
        scale = MANY_SCALES if len(scales) > 1 else next(iter(scales), NO_SCALE)
        squared_norm = float(self._all_ranks.read(mine, call))
        numbers = [squared_norm, scale, float(agreed.has_written + 2 * agreed.has_changed_buffers)]
        message = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        every = self._all_ranks.exchange(message, call).wait().tolist()
        changed = [int(number) for _, _, number in every]
        if any(number % 2 for number in changed):
            self.compare_written(step)
        if any(number >= 2 for number in changed):
            self._buffers.agree("buffers that changed")
        norms = [_root_of_sum(every[rank][0] for rank in replica) for replica in self._replicas]
        own = norms[next(i for i, replica in enumerate(self._replicas) if self._all_ranks.index in replica)]
        another_skips = math.isfinite(own) and not all(map(math.isfinite, norms))  # then all replicas skip the update
        norm = math.nan if another_skips else own
        return norm, self._one_scale([scale for _, scale, _ in every], step)

    def check(self, agreed: Agreed, step: int) -> None:
        """Check loss scales and written values, if no norm is needed.

        Raises:
            PartitaError: as :meth:`norm` does.
        """
        several = len(set(agreed.scales) - {NO_SCALE}) > 1 or any(map(math.isnan, agreed.scales))
        if self._all_ranks.size > self._group.size or agreed.has_written or agreed.has_changed_buffers or several:
            self.norm((), agreed, step)

    def sums(self, squared_norms: Tensor, flags: Tensor) -> list[float]:
        """Return the sums over all ranks of the concatenated tensors."""
        own = torch.cat([part.to(self._device) for part in (squared_norms, flags)])
        found: list[float] = self._all_ranks.read(self._all_ranks.all_reduce(own), "the norm of a unit").tolist()
        return found

    def culprit(self, number: int, name: str) -> Culprit:
        """Return the ``name`` of the rank with the lowest ``number``, and what ranks know about the cause."""
        suspect = self._reducer.finite.is_suspect
        arguments = self._arguments.describe() if suspect else ""
        every = self._all_ranks.exchange_objects((number, name, suspect, arguments), "engine.step")
        _, first, _, _ = min(every, key=lambda message: message[0])
        ranks = [str(rank) for rank, (_, _, is_suspect, _) in enumerate(every) if is_suspect]
        messages = [f"; on rank {rank}, {text}" for rank, (_, _, _, text) in enumerate(every) if text]
        return Culprit(first, ranks, messages[0] if messages else "")


def _read_all(scalars: Sequence[Tensor], read: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return copies of scalars on the host, in order, with one ``read`` of each device."""
    by_device = defaultdict[torch.device, list[int]](list)
    for place, each in enumerate(scalars):
        by_device[each.device].append(place)
    found = list(scalars)
    for places in by_device.values():
        for place, value in zip(places, read(torch.stack([found[p] for p in places])), strict=True):
            found[place] = value
    return found


def _root_of_sum(squared_norms: Iterable[float]) -> float:
    """Return the root of the sum, computed in float64 and rounded to fp32."""
    total = 0.0
    for each in squared_norms:
        total += each
    return torch.tensor(math.sqrt(total) if total >= 0 else math.nan, dtype=torch.float32, device="cpu").item()


CALL = "a comparison of parameters (communication.check_every)"


class ReplicaCheck:
    """Compares stored parameters between ranks that must have the same bits, every so many steps.

    Args:
        wait_for_updates: waits for the updates under way.
        every: optimizer steps between two comparisons; 0 for none.
    """

    def __init__(self, runtime: Runtime, wait_for_updates: Callable[[], None], every: int) -> None:
        self._wait_for_updates = wait_for_updates
        self._all_ranks = runtime.collectives.all_ranks
        by_axes = defaultdict[tuple[str, ...], dict[Unit, list[Segment]]](lambda: defaultdict(list))
        for unit in runtime.units:
            for segment in unit.segments:
                by_axes[segment.plan.parameter_replica_axes][unit].append(segment)
        found = [(runtime.collectives.group(axes), units) for axes, units in by_axes.items()]
        self._compared = [(group, units) for group, units in found if group.size > 1]
        self._every = every if self._compared else 0

    def after_update(self, step: int) -> None:
        """Compare if the step is due; a collective then.

        Raises:
            PartitaError: as :meth:`compare` does.
        """
        if self._every and step % self._every == 0:
            self.compare(step)

    def compare(self, step: int) -> None:
        """Compare one checksum per unit: the sum of its bits as integers.

        Raises:
            PartitaError: on all ranks: the bits of a unit differ between ranks.
        """
        self._wait_for_updates()
        found = list[tuple[Unit, dict[int, int]]]()
        for group, units in self._compared:
            own = torch.tensor(list(map(_checksum, units.values())), dtype=torch.int64, device="cpu")
            every = group.exchange(own, CALL).wait()
            found += [
                (unit, dict(zip(group.ranks, column.tolist(), strict=True)))
                for unit, column in zip(units, every.unbind(1), strict=True)
            ]
        with shared_errors(self._all_ranks):
            for unit, by_rank in found:
                _check(unit, by_rank, step)


def _check(unit: Unit, by_rank: Mapping[int, int], step: int) -> None:
    usual = Counter(by_rank.values()).most_common(1)[0][0]
    differing = [str(rank) for rank, checksum in by_rank.items() if checksum != usual]
    if differing:
        like = next(rank for rank, checksum in by_rank.items() if checksum == usual)
        raise PartitaError(
            f"step {step}: rank {', '.join(differing)} has other parameters of {unit.title} than "
            f"rank {like}; they should have the same bits on ranks {', '.join(map(str, by_rank))} "
            "(communication.check_every). A rank wrote parameters undetectedly, or its memory or processor is faulty. "
            "Continue from a checkpoint (engine.load); write parameters inside `with engine.gathered(..., "
            "modify=True)`"
        )


def _checksum(segments: Sequence[Segment]) -> int:
    """Return the checksum of this rank's stored parameters of some segments."""
    total = 0
    for segment in segments:
        lease = segment.stored.lease()
        words = lease.wait().view(torch.int32)  # segments are padded to multiples of 4 bytes
        total += int(accelerator.read(words.sum(dtype=torch.int64)))
        lease.end(changed=False)
    return total
