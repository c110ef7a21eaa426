"""Quantized collectives: all-gathers and reduce-scatters that send codes (:mod:`partita.kernels.codecs`).

In a gather each rank decodes the codes of all ranks, including its own, so all ranks have the same bits. A sum is an
all-to-all of codes. The receiving rank decodes them and adds them up in fp32, in rank order; it adds its own values
without encoding. If the mesh has a node axis, values are summed inside each node first, and codes of these sums are
exchanged between nodes (Wang et al., "ZeRO++", 2023, sections 3.1 and 3.3: qwZ, qgZ).
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
from partita.sharding.interpreter import FormatCall, RunnableFormat, seed_of
from partita.table.mesh_shape import MeshShape
from partita.table.residence import BLOCK, FP32, Encoding


@dataclass(frozen=True)
class Quantized(RunnableFormat):
    """A format that sends codes instead of values.

    Attributes:
        codec: the codec of a block of values.
        has_error_feedback: True for error feedback (:class:`WithResiduals`).
        stochastic_rounding: True for stochastic rounding, False for rounding to the nearest level.

    Raises:
        ValueError: the codec does not round at random.
    """

    codec: Codec
    has_error_feedback: bool = False
    stochastic_rounding: bool = False

    def __post_init__(self) -> None:
        if self.stochastic_rounding and not self.codec.unbiased:
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
        self, group: Group, source: Tensor, target: Tensor, call: FormatCall, residual: Tensor | None
    ) -> Work:
        codes = call.scratch.view(torch.uint8)[: self.num_bytes(target.numel())]
        row = codes.view(group.size, -1)[group.index]
        seed = seed_of(call.seed, group.index) if self.stochastic_rounding else None
        kernels.encode(self.codec, source, row, seed=seed, residual=residual, threads=torch.get_num_threads())
        return _Gather(self.codec, codes, target, group.all_gather(codes, row, call.purpose, call.tag))


@dataclass(frozen=True, eq=False)
class WithResiduals(RunnableFormat):
    """A quantized format for one call, with the error-feedback residuals of earlier calls.

    Attributes:
        residuals: fp32 tensors: for a gather one, of the size that this rank sends; for a sum one per group, of the
            size that this rank contributes. They are added to the values, and replaced by the quantization error. The
            residual of the rank's own shard becomes zero.
    """

    format: Quantized
    residuals: Sequence[Tensor]

    def num_bytes(self, num_elements: int, encoding: Encoding = FP32) -> int:
        return self.format.num_bytes(num_elements)

    def groups_of_sum(self, axes: tuple[str, ...], mesh: MeshShape) -> tuple[tuple[str, ...], ...]:
        return self.format.groups_of_sum(axes, mesh)

    def gather_scratch_bytes(self, num_elements: int) -> int:
        return self.format.gather_scratch_bytes(num_elements)

    def sum_scratch_bytes(self, num_elements: int, axes: tuple[str, ...], mesh: MeshShape) -> int:
        return self.format.sum_scratch_bytes(num_elements, axes, mesh)

    def begin_gather(self, group: Group, source: Tensor, target: Tensor, call: FormatCall) -> Work:
        return self.format._begin_gather(group, source, target, call, self.residuals[0])

    def reduce_scatter(
        self, groups: Sequence[Group], source: Tensor, target: Tensor, call: FormatCall, *, accumulate: bool
    ) -> None:
        reduce_scatter(groups, self.format, source, target, call, accumulate=accumulate, residuals=self.residuals)


def hops(axes: tuple[str, ...], mesh: MeshShape) -> tuple[tuple[str, ...], ...]:
    """Return the axes of each exchange of a sum over ``axes``, in order.

    If the mesh has a node axis, the first exchange is inside each node, and the second between nodes (ZeRO++, section
    3.3). Otherwise there is one exchange over all axes.
    """
    active = mesh.active(axes)
    inner = tuple(axis for axis in active if axis != "node")
    if active[:1] != ("node",) or not inner:
        return (mesh.named(active),) if active else ()
    return mesh.named(inner), ("node",)


def scratch_of_sum(codec: Codec, num_elements: int, sizes: Sequence[int]) -> int:
    """Return the scratch bytes of a sum of ``num_elements`` over groups of these sizes, in order.

    They are for the sent and received codes of the first group, which has the most, and for each group's sum in fp32.
    """
    total = 2 * codec.num_bytes(num_elements)
    for size in sizes:
        num_elements //= size
        total += num_elements * FP32.itemsize
    return total


@dataclass(frozen=True)
class _Gather:
    """A gather in progress. :meth:`wait` decodes the received codes into ``target``."""

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
    source: Tensor,
    out: Tensor,
    call: FormatCall,
    *,
    accumulate: bool,
    residuals: Sequence[Tensor] = (),
) -> None:
    """Reduce-scatter ``source`` ``[n]`` over all ``groups``, in order. Write this rank's shard to ``out``, or add it.

    The last group has the outermost axes. The shard is the same as after one reduce-scatter over all axes. Each rank's
    position is part of its seed. ``residuals``: see :class:`WithResiduals`.
    """
    values, scratch = source, call.scratch.view(torch.uint8)
    num_codes = form.num_bytes(source.numel())
    first_sum = 2 * num_codes
    assert scratch.numel() >= scratch_of_sum(form.codec, source.numel(), [group.size for group in groups])
    for place, group in enumerate(groups):
        rows_per_rank = 1
        for later in groups[place + 1 :]:
            rows_per_rank *= later.size
        # [later groups, this group, shard]: several rows for each rank of this group.
        rows = values.view(rows_per_rank, group.size, -1).transpose(0, 1)
        residual_rows = residuals[place].view(rows_per_rank, group.size, -1).transpose(0, 1) if residuals else None
        num_bytes = form.num_bytes(values.numel())
        codes, received = (scratch[at : at + num_bytes].view(group.size, rows_per_rank, -1) for at in (0, num_codes))
        stop = first_sum + values.numel() // group.size * 4
        total = scratch[first_sum:stop].view(torch.float32).view(rows_per_rank, -1)
        _exchange(group, form, rows, (codes, received), residual_rows, seed=seed_of(call.seed, place, group.index))
        own_residual = None if residual_rows is None else residual_rows[group.index]
        _add_up(group, form, rows[group.index], received, total, own_residual)
        values, first_sum = total.view(-1), stop
    write_out(values, out, accumulate=accumulate)


def _exchange(
    group: Group,
    form: Quantized,
    rows: Tensor,  # [size, outer, n]
    buffers: tuple[Tensor, Tensor],
    residuals: Tensor | None,
    *,
    seed: int,
) -> None:
    """Send each other rank the codes of its ``rows``. ``buffers``: memory for the sent and the received codes."""
    codes, received = buffers
    encode = partial(kernels.encode, form.codec, threads=torch.get_num_threads())
    num_blocks = rows.shape[-1] // BLOCK
    for rank in range(group.size):
        for number, values in enumerate(rows[rank] if rank != group.index else ()):
            first = (rank * rows.shape[1] + number) * num_blocks
            chosen = seed if form.stochastic_rounding else None
            residual = None if residuals is None else residuals[rank, number]
            encode(values, codes[rank, number], seed=chosen, first_block=first, residual=residual)
    group.all_to_all_single(received.view(-1), codes.view(-1))


def _add_up(
    group: Group, form: Quantized, own: Tensor, received: Tensor, total: Tensor, residual: Tensor | None
) -> None:
    """Sum ``received`` and this rank's ``own`` values, in rank order. Add its residual, and set that to zero."""
    for rank in range(group.size):
        if rank != group.index:
            kernels.decode(
                form.codec, received[rank].view(-1), total.view(-1), add=rank > 0, threads=torch.get_num_threads()
            )
        else:
            for values, summed, kept in in_chunks(own, total, total if residual is None else residual):
                write_out(values, summed, accumulate=rank > 0)
                if residual is not None:
                    summed.add_(kept)
                    kept.zero_()
