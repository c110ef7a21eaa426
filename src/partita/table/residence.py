"""The residence of a training state: the axes it is sharded over or partial over, its encoding and its memory."""

from dataclasses import dataclass
from enum import Enum

from partita.table.mesh_shape import MeshShape, expand


class Tier(Enum):
    """The memories in which a state can be stored."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


# Elements that share a scale. Parameters and shards start at multiples of it.
BLOCK = 256


@dataclass(frozen=True)
class Encoding:
    """The form in which values are stored.

    ``itemsize`` is in bytes per value; each block of ``BLOCK`` values takes ``block_bytes`` more.
    """

    name: str
    itemsize: int
    block_bytes: int = 0

    def num_bytes(self, num_elements: int) -> int:
        return num_elements * self.itemsize + -(-num_elements // BLOCK) * self.block_bytes


FP32 = Encoding("fp32", 4)
BF16 = Encoding("bf16", 2)
FP16 = Encoding("fp16", 2)
# Memory-saving encodings: the low half of an fp32 value whose high half is the stored bf16 parameter, and 8-bit codes
# with an fp32 scale per block (:mod:`partita.kernels.quantize`).
SPLIT = Encoding("split", 2)
INT8 = Encoding("int8", 1, 4)
ENCODINGS = {encoding.name: encoding for encoding in (FP32, BF16, FP16)}


@dataclass(frozen=True)
class Residence:
    """The storage of one state of one unit.

    ``shard_axes``: the axes it is sharded over, outermost first; a rank has the shard of its
    :meth:`MeshShape.group_index`. ``partial_axes``: the axes over which the ranks' values still have to be added up.

    Raises:
        ValueError: an axis is named twice (``data`` is both ``node`` and ``local``).
    """

    shard_axes: tuple[str, ...] = ()
    partial_axes: tuple[str, ...] = ()
    encoding: Encoding = FP32
    tier: Tier = Tier.DEVICE

    def __post_init__(self) -> None:
        axes = expand(self.shard_axes + self.partial_axes)
        if len(set(axes)) < len(axes):
            raise ValueError(f"a state is sharded or partial over an axis once at most (data: node, local): {self}")

    def num_elements(self, padded: int, mesh: MeshShape) -> int:
        """Return the elements that a rank stores of a padded flat buffer of ``padded`` elements."""
        return padded // mesh.group_size(self.shard_axes)

    def num_bytes(self, padded: int, mesh: MeshShape) -> int:
        """Return the bytes that a rank stores of a padded flat buffer of ``padded`` elements."""
        return self.encoding.num_bytes(self.num_elements(padded, mesh))
