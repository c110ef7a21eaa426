"""The operations that take a state from one residence to another: the only place that knows how a state moves.

The order is always the same: read from disk, re-encode (so that the wire carries the destination's encoding), copy to the
device if anything is to be communicated, reduce, gather, slice, copy to the destination's tier, write to disk. Axes of
size 1 take part in nothing: there a shard *is* the whole, and the list of operations is empty.
"""

from dataclasses import dataclass

from partita.plan.mesh_shape import DATA_PARTS, MeshShape
from partita.plan.residence import Encoding, Residence, Tier


@dataclass(frozen=True)
class AllGather:
    axes: tuple[str, ...]


@dataclass(frozen=True)
class ReduceScatter:
    axes: tuple[str, ...]


@dataclass(frozen=True)
class AllReduce:
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Slice:
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Encode:
    encoding: Encoding


@dataclass(frozen=True)
class Copy:
    tier: Tier


@dataclass(frozen=True)
class Read:
    """Disk to host."""


@dataclass(frozen=True)
class Write:
    """Host to disk."""


Step = AllGather | ReduceScatter | AllReduce | Slice | Encode | Copy | Read | Write


def steps(src: Residence, dst: Residence, mesh: MeshShape) -> tuple[Step, ...]:
    """The ordered operations from ``src`` to ``dst``; empty when nothing has to move.

    Raises:
        ValueError: ``dst`` is partial over an axis over which ``src`` is not (a sum cannot be undone), or ``src`` is
            partial over some axes and ``dst`` sharded over others, which no single reduction does.
    """
    split = any(axis in DATA_PARTS for r in (src, dst) for axis in (*r.shard_axes, *r.partial_axes))
    src_shard, dst_shard = (_active(r.shard_axes, mesh, split) for r in (src, dst))
    src_partial, dst_partial = (_active(r.partial_axes, mesh, split) for r in (src, dst))
    if not set(dst_partial) <= set(src_partial):
        raise ValueError(f"a sum over {dst_partial} cannot be undone: {src} -> {dst}")

    communicated = _communicate(src_shard, dst_shard, tuple(a for a in src_partial if a not in dst_partial))
    tier, ops = src.tier, list[Step]()
    if tier is Tier.DISK and (communicated or dst.tier is not Tier.DISK or src.encoding != dst.encoding):
        ops.append(Read())
        tier = Tier.HOST
    if src.encoding != dst.encoding:
        ops.append(Encode(dst.encoding))
    if any(not isinstance(op, Slice) for op in communicated) and tier is not Tier.DEVICE:
        ops.append(Copy(Tier.DEVICE))
        tier = Tier.DEVICE
    ops += communicated
    if tier is not dst.tier:
        if Tier.DEVICE in (tier, dst.tier):
            ops.append(Copy(Tier.DEVICE if dst.tier is Tier.DEVICE else Tier.HOST))
        if dst.tier is Tier.DISK:
            ops.append(Write())
    return tuple(ops)


def _active(axes: tuple[str, ...], mesh: MeshShape, split: bool) -> tuple[str, ...]:
    """``axes`` without those of size 1, with data written as node x local where either side names those."""
    expanded = (part for axis in axes for part in (DATA_PARTS if split and axis == "data" else (axis,)))
    return tuple(axis for axis in expanded if mesh.size(axis) > 1)


def _communicate(src: tuple[str, ...], dst: tuple[str, ...], reduced: tuple[str, ...]) -> list[Step]:
    """Reductions, gathers and slices between two shardings, once encodings and tiers are put aside."""
    if reduced:
        scattered = tuple(axis for axis in dst if axis not in src)
        if dst[: len(src)] != src or (scattered and scattered != reduced):
            raise ValueError(f"no single reduction over {reduced} turns shards over {src} into shards over {dst}")
        return [ReduceScatter(reduced) if scattered else AllReduce(reduced)]
    common = 0
    while common < min(len(src), len(dst)) and src[common] == dst[common]:
        common += 1
    ops = list[Step]()
    if src[common:]:
        ops.append(AllGather(src[common:]))
    if dst[common:]:
        ops.append(Slice(dst[common:]))
    return ops
