"""Quantized collectives: all-gathers and reduce-scatters of which codes travel (:mod:`partita.kernels.codecs`).

A gather decodes what every rank has encoded, its own part too: all ranks have the same bits. A sum is an all-to-all of
codes, which the rank that gets them decodes and adds up in fp32, in rank order; what it has itself, it adds as it is.
Where the mesh tells nodes apart, the sums are made inside each node first, and codes of these cross between nodes
(Wang et al., "ZeRO++", 2023, sections 3.1 and 3.3: qwZ, qgZ).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from partita.comm.group import Group
from partita.comm.transport import Work, write_out
from partita.kernels import codec as kernels
from partita.kernels.chunks import in_chunks
from partita.kernels.codecs import Codec
from partita.plan.mesh_shape import MeshShape
from partita.plan.residence import BLOCK, FP32, Encoding
from partita.sharding.interpreter import FormatCall, RunnableFormat, seed_of


@dataclass(frozen=True)
class Quantized(RunnableFormat):
    """Codes in place of values.

    Attributes:
        codec: what a block of values becomes.
        keeps_errors: what rounding takes away is kept, and added to what is sent next (:class:`WithErrors`).
        rounds_at_random: values are rounded at random; otherwise to the nearest level.

    Raises:
        ValueError: the codec does not round at random.
    """

    codec: Codec
    keeps_errors: bool = False
    rounds_at_random: bool = False

    def __post_init__(self) -> None:
        if self.rounds_at_random and not self.codec.unbiased:
            raise ValueError(f"{self.codec.name} does not round at random")

    def num_bytes(self, num_elements: int, encoding: Encoding = FP32) -> int:
        return self.codec.num_bytes(num_elements)

    def groups_of_sum(self, axes: tuple[str, ...], mesh: MeshShape) -> tuple[tuple[str, ...], ...]:
        return hops(axes, mesh)

    def gather_scratch_bytes(self, num_elements: int) -> int:
        return self.num_bytes(num_elements)

    def sum_scratch_bytes(self, num_elements: int, axes: tuple[str, ...], mesh: MeshShape) -> int:
        return scratch_of_sum(self.codec, num_elements, [mesh.group_size(hop) for hop in hops(axes, mesh)])

    def begin_gather(self, group: Group, source: Tensor, target: Tensor, call: FormatCall) -> Work:
        return self._begin_gather(group, source, target, call, None)

    def reduce_scatter(
        self, groups: Sequence[Group], source: Tensor, target: Tensor, call: FormatCall, *, accumulate: bool
    ) -> None:
        reduce_scatter(groups, self, source, target, call, accumulate=accumulate)

    def _begin_gather(
        self, group: Group, source: Tensor, target: Tensor, call: FormatCall, errors: Tensor | None
    ) -> Work:
        codes = call.scratch.view(torch.uint8)[: self.num_bytes(target.numel())]
        own = codes.view(group.size, -1)[group.index]
        seed = seed_of(call.seed, group.index) if self.rounds_at_random else None
        kernels.encode(self.codec, source, own, seed=seed, held=errors, threads=torch.get_num_threads())
        return _Gather(self.codec, codes, target, group.all_gather(codes, own, call.purpose, call.tag))


@dataclass(frozen=True, eq=False)
class WithErrors(RunnableFormat):
    """A quantized format for one call, with the errors of earlier calls.

    Attributes:
        errors: fp32. Of a gather one tensor, as large as what this rank sends; of a sum one for each of its groups, as
            large as what this rank sums up in it. They are added to the values, and hold afterwards what the codes do
            not give back. Of the rank's own part they are used up.
    """

    format: Quantized
    errors: Sequence[Tensor]

    def num_bytes(self, num_elements: int, encoding: Encoding = FP32) -> int:
        return self.format.num_bytes(num_elements)

    def groups_of_sum(self, axes: tuple[str, ...], mesh: MeshShape) -> tuple[tuple[str, ...], ...]:
        return self.format.groups_of_sum(axes, mesh)

    def gather_scratch_bytes(self, num_elements: int) -> int:
        return self.format.gather_scratch_bytes(num_elements)

    def sum_scratch_bytes(self, num_elements: int, axes: tuple[str, ...], mesh: MeshShape) -> int:
        return self.format.sum_scratch_bytes(num_elements, axes, mesh)

    def begin_gather(self, group: Group, source: Tensor, target: Tensor, call: FormatCall) -> Work:
        return self.format._begin_gather(group, source, target, call, self.errors[0])

    def reduce_scatter(
        self, groups: Sequence[Group], source: Tensor, target: Tensor, call: FormatCall, *, accumulate: bool
    ) -> None:
        reduce_scatter(groups, self.format, source, target, call, accumulate=accumulate, errors=self.errors)


def hops(axes: tuple[str, ...], mesh: MeshShape) -> tuple[tuple[str, ...], ...]:
    """Return the axes over which codes are exchanged for a sum over ``axes``, one after the other.

    Inside each node, and of those sums between the nodes (ZeRO++, section 3.3), where the mesh tells nodes apart;
    otherwise over all at once.
    """
    active = mesh.active(axes)
    inner = tuple(axis for axis in active if axis != "node")
    if active[:1] != ("node",) or not inner:
        return (mesh.named(active),) if active else ()
    return mesh.named(inner), ("node",)


def scratch_of_sum(codec: Codec, num_elements: int, sizes: Sequence[int]) -> int:
    """Return the scratch memory of a sum of ``num_elements`` over groups of these sizes, one after the other.

    It has room for what is sent and received of the first, the largest, and for each one's sum in fp32.
    """
    total = 2 * codec.num_bytes(num_elements)
    for size in sizes:
        num_elements //= size
        total += num_elements * FP32.itemsize
    return total


@dataclass(frozen=True)
class _Gather:
    """Under way: what has come is decoded into ``target`` by :meth:`wait`."""

    codec: Codec
    codes: Tensor
    target: Tensor
    work: Work

    def wait(self) -> None:
        self.work.wait()
        kernels.decode(self.codec, self.codes, self.target, threads=torch.get_num_threads())


def reduce_scatter(
    groups: Sequence[Group],
    form: Quantized,
    sent: Tensor,
    out: Tensor,
    call: FormatCall,
    *,
    accumulate: bool,
    errors: Sequence[Tensor] = (),
) -> None:
    """Write the sum over all ``groups``, one after the other, of the ranks' ``sent`` ``[n]`` into ``out``, or add it.

    Of several groups the last has the outermost axes: this rank's part lies as after one sum over all of them. Each
    rank adds its own place to the seed. ``errors`` as :class:`WithErrors` has them.
    """
    values, scratch = sent, call.scratch.view(torch.uint8)
    num_codes = form.num_bytes(sent.numel())
    first_sum = 2 * num_codes
    assert scratch.numel() >= scratch_of_sum(form.codec, sent.numel(), [group.size for group in groups])
    for place, group in enumerate(groups):
        num_outer = 1
        for outer in groups[place + 1 :]:
            num_outer *= outer.size
        # [outer, this group, part]: what goes to one rank of the group is a row for each of the outer ranks.
        rows = values.view(num_outer, group.size, -1).transpose(0, 1)
        error_rows = errors[place].view(num_outer, group.size, -1).transpose(0, 1) if errors else None
        num_bytes = form.num_bytes(values.numel())
        codes, received = (scratch[at : at + num_bytes].view(group.size, num_outer, -1) for at in (0, num_codes))
        stop = first_sum + values.numel() // group.size * 4
        total = scratch[first_sum:stop].view(torch.float32).view(num_outer, -1)
        _exchange(group, form, rows, (codes, received), error_rows, seed=seed_of(call.seed, place, group.index))
        own_errors = None if error_rows is None else error_rows[group.index]
        _add_up(group, form, rows[group.index], received, total, own_errors)
        values, first_sum = total.view(-1), stop
    write_out(values, out, accumulate=accumulate)


def _exchange(
    group: Group, form: Quantized, rows: Tensor, room: tuple[Tensor, Tensor], errors: Tensor | None, *, seed: int
) -> None:
    """Send each other rank the codes of its ``rows`` ``[size, outer, n]``. ``room``: for those, and for what comes."""
    codes, received = room
    encode = partial(kernels.encode, form.codec, threads=torch.get_num_threads())
    num_blocks = rows.shape[-1] // BLOCK
    for rank in range(group.size):
        for number, values in enumerate(rows[rank] if rank != group.index else ()):
            first = (rank * rows.shape[1] + number) * num_blocks
            chosen = seed if form.rounds_at_random else None
            kept = None if errors is None else errors[rank, number]
            encode(values, codes[rank, number], seed=chosen, first_block=first, held=kept)
    group.exchange_parts(received.view(-1), codes.view(-1))


def _add_up(group: Group, form: Quantized, own: Tensor, received: Tensor, total: Tensor, errors: Tensor | None) -> None:
    """Add up ``received`` and this rank's ``own``, in rank order, with its errors."""
    for rank in range(group.size):
        if rank != group.index:
            kernels.decode(
                form.codec, received[rank].view(-1), total.view(-1), add=rank > 0, threads=torch.get_num_threads()
            )
        else:
            for mine, summed, kept in in_chunks(own, total, total if errors is None else errors):
                write_out(mine, summed, accumulate=rank > 0)
                if errors is not None:
                    summed.add_(kept)
                    kept.zero_()
