"""Gathers and sums of which codes travel (:mod:`partita.plan.wire`), made of exchanges of bytes.

A gather decodes what every rank has encoded, its own part too: all ranks have the same bits. A sum is an all-to-all of
codes, which the rank that gets them decodes and adds up in fp32, in rank order; what it has itself, it adds as it is.
Where the mesh tells nodes apart, the sums are made inside each node first, and codes of these cross between nodes
(Wang et al., "ZeRO++", 2023, sections 3.1 and 3.3: qwZ, qgZ).
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from partita.comm.exchange import Work
from partita.comm.group import Group
from partita.comm.transport import write_out
from partita.kernels import codec as kernels
from partita.kernels.chunks import chunks, in_chunks
from partita.kernels.quantize import nearest_bf16
from partita.plan.residence import BLOCK
from partita.plan.wire import Codec, Wire, coded_sum_bytes


@dataclass(frozen=True)
class Gather:
    """Under way: what has come is decoded into ``target`` by :meth:`wait`."""

    codec: Codec
    codes: Tensor
    target: Tensor
    work: Work

    def wait(self) -> None:
        self.work.wait()
        kernels.decode(self.codec, self.codes, self.target, threads=torch.get_num_threads())


@dataclass(frozen=True)
class Rounding:
    """How values become codes: by random numbers that follow from ``seed`` (each rank adds its own place), where the
    wire rounds so; with what was ``held`` back, fp32 ``[n]``, where it does that.
    """

    seed: int = 0
    held: Tensor | None = None


def begin_gather(
    group: Group, wire: Wire, source: Tensor, target: Tensor, codes: Tensor, *, how: Rounding, purpose: str, tag: int
) -> Gather:
    """Begin to gather every rank's ``source`` ``[n]`` into ``target`` ``[size * n]``.

    Args:
        codes: memory for those of ``target``.
    """
    codec = wire.codec
    assert codec is not None
    codes = codes.view(torch.uint8)[: codec.num_bytes(target.numel())]
    own = codes.view(group.size, -1)[group.index]
    seed = seed_of(how.seed, group.index) if wire.unbiased else None
    kernels.encode(codec, source, own, seed=seed, held=how.held, threads=torch.get_num_threads())
    return Gather(codec, codes, target, group.all_gather(codes, own, purpose, tag))


def gather_changes(group: Group, wire: Wire, updated: Tensor, whole: Tensor, scratch: Tensor) -> None:
    """Bring ``whole`` ``[size * n]``, which all ranks have alike, nearer to what each has ``updated`` ``[n]``. What is
    lost of the changes is in the next ones.

    Args:
        scratch: memory for the codes of ``whole``, and for ``n`` values in fp32.
    """
    assert wire.codec is not None
    decode = partial(kernels.decode, wire.codec, threads=torch.get_num_threads())
    parts, num_codes = whole.view(group.size, -1), wire.codec.num_bytes(whole.numel())
    scratch = scratch.view(torch.uint8)
    codes = scratch[:num_codes].view(group.size, -1)
    change = scratch[num_codes : num_codes + updated.numel() * 4].view(torch.float32)
    torch.sub(updated, parts[group.index], out=change)
    kernels.encode(wire.codec, change, codes[group.index], threads=torch.get_num_threads())
    group.all_gather(codes.view(-1), codes[group.index], "parameters").wait()
    for rank, part in enumerate(parts):
        if part.dtype == torch.float32:
            decode(codes[rank], part, add=True)
        else:
            decode(codes[rank], change)
            change.add_(part)
            for at in chunks(change):  # rounded as the optimizer's kernels round masters
                part[at].copy_(nearest_bf16(change[at]) if part.dtype == torch.bfloat16 else change[at])


def reduce_scatter(
    groups: Sequence[Group],
    wire: Wire,
    sent: Tensor,
    out: Tensor,
    scratch: Tensor,
    *,
    seed: int,
    accumulate: bool,
    held: Sequence[Tensor] = (),
) -> None:
    """Write the sum over all ``groups``, one after the other, of the ranks' ``sent`` ``[n]`` into ``out``, or add it.
    Of several groups the last has the outermost axes: what is this rank's part lies as after one sum over all of them.

    Args:
        scratch: memory of :func:`~partita.plan.wire.coded_sum_bytes`.
        seed: of the random numbers; each rank adds its own place.
        held: of each group, fp32, as large as what this rank sums up in it: it is added to that, and holds afterwards
            what the codes do not give back. Of the rank's own part it is used up.
    """
    values, scratch = sent, scratch.view(torch.uint8)
    num_codes = wire.num_bytes(sent.numel())
    first_sum = 2 * num_codes
    assert scratch.numel() >= coded_sum_bytes(wire, sent.numel(), [group.size for group in groups])
    for place, group in enumerate(groups):
        num_outer = 1
        for outer in groups[place + 1 :]:
            num_outer *= outer.size
        # [outer, this group, part]: what goes to one rank of the group is a row for each of the outer ranks.
        rows = values.view(num_outer, group.size, -1).transpose(0, 1)
        held_rows = held[place].view(num_outer, group.size, -1).transpose(0, 1) if held else None
        num_bytes = wire.num_bytes(values.numel())
        codes, received = (scratch[at : at + num_bytes].view(group.size, num_outer, -1) for at in (0, num_codes))
        stop = first_sum + values.numel() // group.size * 4
        total = scratch[first_sum:stop].view(torch.float32).view(num_outer, -1)
        _exchange(group, wire, rows, (codes, received), held_rows, seed=seed_of(seed, place, group.index))
        _add_up(group, wire, rows[group.index], received, total, None if held_rows is None else held_rows[group.index])
        values, first_sum = total.view(-1), stop
    write_out(values, out, accumulate=accumulate)


def _exchange(
    group: Group, wire: Wire, rows: Tensor, room: tuple[Tensor, Tensor], held: Tensor | None, *, seed: int
) -> None:
    """Send each other rank the codes of its ``rows`` ``[size, outer, n]``. ``room``: for those, and for what comes."""
    assert wire.codec is not None
    codes, received = room
    encode = partial(kernels.encode, wire.codec, threads=torch.get_num_threads())
    num_blocks = rows.shape[-1] // BLOCK
    for rank in range(group.size):
        for number, values in enumerate(rows[rank] if rank != group.index else ()):
            first = (rank * rows.shape[1] + number) * num_blocks
            chosen = seed if wire.unbiased else None
            kept = None if held is None else held[rank, number]
            encode(values, codes[rank, number], seed=chosen, first_block=first, held=kept)
    group.exchange_parts(received.view(-1), codes.view(-1))


def _add_up(group: Group, wire: Wire, own: Tensor, received: Tensor, total: Tensor, held: Tensor | None) -> None:
    """Add up ``received`` and this rank's ``own``, in rank order, with what was held back of that."""
    assert wire.codec is not None
    for rank in range(group.size):
        if rank != group.index:
            kernels.decode(
                wire.codec, received[rank].view(-1), total.view(-1), add=rank > 0, threads=torch.get_num_threads()
            )
        else:
            for mine, summed, kept in in_chunks(own, total, total if held is None else held):
                write_out(mine, summed, accumulate=rank > 0)
                if held is not None:
                    summed.add_(kept)
                    kept.zero_()


def seed_of(*numbers: int) -> int:
    """A seed of its own for each sequence of numbers, the same in every run."""
    return zlib.crc32(repr(numbers).encode())
