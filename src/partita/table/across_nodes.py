"""Groups of ranks that span several nodes, and the elements that a layer sends along each axis.

Ranks are numbered node by node, and tensor is the innermost axis of the mesh: it sends most per layer, and stays within
a node if its size allows it. Then follow sequence, data, and pipeline, which sends least.
"""

from dataclasses import dataclass

from partita.table.mesh_shape import MeshShape

# What a transformer layer sends, for tokens of a width w: tensor sums [tokens, w] twice in forward, twice in backward
# (M. Shoeybi et al., "Megatron-LM", 2019, section 3), each as two halves of (n - 1) / n; data sums and gathers the
# layer's 12 w^2 parameters (S. Rajbhandari et al., "ZeRO", 2020, section 7).
_TENSOR_SUMS, _LAYER_MATRICES = 4, 12
# Axes whose groups should be within a node, with the axes inside them.
_WITHIN_NODES = (("tensor", ()), ("sequence", ("tensor",)))


@dataclass(frozen=True)
class Crossing:
    """The groups along ``axis``, of ``size`` ranks each, that span several nodes of ``ranks_per_node``.

    These are ``num_crossing`` of ``num_groups``, each on up to ``num_nodes`` nodes. ``sizes``: the sizes of the axis
    with which no group would span nodes.
    """

    axis: str
    size: int
    ranks_per_node: int
    num_groups: int
    num_crossing: int
    num_nodes: int
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        sizes = " or ".join(map(str, self.sizes))
        text = (
            f"parallel.{self.axis}: {self.size} with {self.ranks_per_node} ranks on each node: {self.num_crossing} of "
            f"{self.num_groups} groups span up to {self.num_nodes} nodes, so each layer communicates over the "
            f"network; with parallel.{self.axis}: {sizes} none would"
        )
        if self.axis == "tensor":
            text += (
                f". Across nodes, data sends less than tensor from {crossing_tokens(1)} x width tokens per replica and "
                "step on, and pipeline less than both where a stage has many layers"
            )
        return text


def needless_crossings(mesh: MeshShape, ranks_per_node: int | None) -> list[Crossing]:
    """Return the groups along tensor that span nodes, and those along sequence that span nodes needlessly."""
    found = []
    if ranks_per_node is None or ranks_per_node >= mesh.num_ranks:
        return []
    for axis, inner in _WITHIN_NODES:
        size, unit = mesh.size(axis), mesh.group_size(inner)
        groups = [{rank // ranks_per_node for rank in group} for group in mesh.groups((axis,))]
        crossing = [nodes for nodes in groups if len(nodes) > 1]
        sizes = tuple(n for n in range(1, size) if size % n == 0 and ranks_per_node % (n * unit) == 0)
        must = axis != "tensor" and size * unit > ranks_per_node
        if crossing and sizes and not must:
            most = max(map(len, crossing))
            found.append(Crossing(axis, size, ranks_per_node, len(groups), len(crossing), most, sizes))
    return found


def sent_elements(axis: str, size: int, tokens: int, width: int) -> float:
    """Return the elements that each rank sends along ``axis`` for one transformer layer and step, with ``tokens`` per
    replica; along pipeline, for all of its layers.

    Raises:
        ValueError: for another axis than tensor, data and pipeline.
    """
    share = 2 * (size - 1) / size  # of an all-reduce: a reduce-scatter and an all-gather
    if axis == "tensor":
        return _TENSOR_SUMS * share * tokens * width
    if axis == "data":
        return share * _LAYER_MATRICES * width**2
    if axis == "pipeline":
        return float(2 * tokens * width) if size > 1 else 0.0
    raise ValueError(f"expected tensor, data or pipeline; got {axis!r}")


def crossing_tokens(width: int) -> int:
    """Return the tokens per replica and step above which tensor sends more than data: 3 times the width."""
    return _LAYER_MATRICES * width // _TENSOR_SUMS
