"""The operations that move a state from one residence to another; no other module defines them.

The order is always the same: read from disk, slice where nothing has to be communicated before, re-encode (so that the
destination's encoding is communicated), copy to the device if anything is communicated, communicate, copy to the
destination's tier, write to disk. Axes of size 1 are left out: a shard over them is the full state, and the list of
operations is empty.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import groupby, takewhile

from partita.table.formats import FULL, Format
from partita.table.mesh_shape import AXES, MeshShape, expand
from partita.table.residence import Encoding, Residence, Tier


@dataclass(frozen=True)
class AllGather:
    """An all-gather of the shards of a group, in group order; ``axes`` are the innermost shard axes."""

    axes: tuple[str, ...]
    format: Format = FULL


@dataclass(frozen=True)
class ReduceScatter:
    """A reduce-scatter over a group: each rank gets the shard of its group index."""

    axes: tuple[str, ...]
    format: Format = FULL


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce over a group. Terms are sent in ``format``, sums in ``back``."""

    axes: tuple[str, ...]
    format: Format = FULL
    back: Format = FULL


@dataclass(frozen=True)
class Slice:
    """A slice: each rank keeps the shard of its index in the group; nothing is communicated."""

    axes: tuple[str, ...]


@dataclass(frozen=True)
class Encode:
    """A conversion of the values to another encoding."""

    encoding: Encoding


@dataclass(frozen=True)
class Copy:
    """A copy between device and host."""

    tier: Tier


@dataclass(frozen=True)
class Read:
    """A read from disk to host."""


@dataclass(frozen=True)
class Write:
    """A write from host to disk."""


Communicating = AllGather | ReduceScatter | AllReduce
Step = Communicating | Slice | Encode | Copy | Read | Write


def in_phases(ops: Iterable[Step]) -> tuple[Step, ...]:
    """Return ``ops`` with each all-reduce as a reduce-scatter and an all-gather.

    Between the two, a shard can be measured and scaled on the rank that sums it; the result is the same.
    """
    phases = list[Step]()
    for op in ops:
        phases += (
            [ReduceScatter(op.axes, op.format), AllGather(op.axes, op.back)] if isinstance(op, AllReduce) else [op]
        )
    return tuple(phases)


def in_formats(ops: Iterable[Step], summed: Format, gathered: Format) -> tuple[Step, ...]:
    """Return ``ops`` with these formats for sums and for all-gathers."""
    found = list[Step]()
    for op in ops:
        match op:
            case AllGather(axes):
                op = AllGather(axes, gathered)
            case ReduceScatter(axes):
                op = ReduceScatter(axes, summed)
            case AllReduce(axes):
                op = AllReduce(axes, summed, gathered)
        found.append(op)
    return tuple(found)


@cache
def steps(src: Residence, dst: Residence, mesh: MeshShape) -> tuple[Step, ...]:
    """Return the ordered operations from ``src`` to ``dst``; empty if nothing has to move.

    Operations over the full data axis name it ``data``; others name ``node`` or ``local``. The
    axes of each operation are in the mesh's order, in which ranks are numbered. If shard axes are in another order,
    there are several operations: gathers from the innermost axes on, sums from the outermost.

    Raises:
        ValueError: ``dst`` is partial over an axis over which ``src`` is not (a sum cannot be undone).
    """
    src_shard, dst_shard = mesh.active(src.shard_axes), mesh.active(dst.shard_axes)
    src_partial, dst_partial = mesh.active(src.partial_axes), mesh.active(dst.partial_axes)
    if not set(dst_partial) <= set(src_partial):
        raise ValueError(f"a sum over {dst_partial} cannot be undone: {src} -> {dst}")

    moves = _moves(src_shard, dst_shard, tuple(axis for axis in src_partial if axis not in dst_partial), mesh)
    if not moves and (src.encoding, src.tier) == (dst.encoding, dst.tier):
        return ()
    ops, tier = list[Step](), src.tier
    if tier is Tier.DISK:
        ops.append(Read())
        tier = Tier.HOST
    cuts = list(takewhile(lambda move: isinstance(move, Slice), moves))
    ops += cuts
    if src.encoding != dst.encoding:
        ops.append(Encode(dst.encoding))
    communicated = moves[len(cuts) :]
    if communicated and tier is not Tier.DEVICE:
        ops.append(Copy(Tier.DEVICE))
        tier = Tier.DEVICE
    ops += communicated
    landing = Tier.HOST if dst.tier is Tier.DISK else dst.tier
    if tier is not landing:
        ops.append(Copy(landing))
    if dst.tier is Tier.DISK:
        ops.append(Write())
    return tuple(ops)


def _moves(src: tuple[str, ...], dst: tuple[str, ...], reduced: tuple[str, ...], mesh: MeshShape) -> list[Step]:
    """Return the operations from shards over ``src``, to be summed over ``reduced``, to shards over ``dst``.

    Encodings and tiers are left out.
    """
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(src, dst, strict=False)))
    gathered, cut = src[common:], dst[common:]
    moves = list[Step]()
    if gathered:  # sums come first, while a rank holds little
        if reduced:
            moves.append(AllReduce(mesh.named(reduced)))
        moves += [AllGather(axes) for axes in reversed(_in_order(gathered, mesh))]
        reduced = ()
    for is_summed, run in groupby(cut, lambda axis: axis in reduced):
        for axes in _in_order(tuple(run), mesh):
            moves.append(ReduceScatter(axes) if is_summed else Slice(axes))
    if remaining := tuple(axis for axis in reduced if axis not in cut):
        moves.append(AllReduce(mesh.named(remaining)))
    return moves


def _in_order(axes: tuple[str, ...], mesh: MeshShape) -> list[tuple[str, ...]]:
    """Return ``axes``, outermost first, cut into the longest runs that are in the mesh's order."""
    runs, order = list[list[str]](), expand(AXES)
    for axis in axes:
        if runs and order.index(runs[-1][-1]) < order.index(axis):
            runs[-1].append(axis)
        else:
            runs.append([axis])
    return [mesh.named(tuple(run)) for run in runs]
