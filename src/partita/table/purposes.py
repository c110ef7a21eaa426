"""The purposes of messages between ranks. Each has its own connections, so they need no common order.

Parameters are unsharded, gradients reduced, activations exchanged in forward and backward. Control messages, which are
small, coordinate all of it; a group without connections for them uses those of a larger group.
"""

from collections.abc import Iterable, Mapping

from partita.table.mesh_shape import ACTIVATION_AXES, STATE_AXES, MeshShape

PURPOSES = ("parameters", "gradients", "activations", "control")
BULK_PURPOSES = PURPOSES[:3]
# The purposes of a group, by its axes.
Needs = Mapping[tuple[str, ...], frozenset[str]]


def all_purposes(axes: tuple[str, ...]) -> frozenset[str]:
    """Return every purpose that the ranks along ``axes`` may have; activations are exchanged along single axes only."""
    has_activations = len(axes) == 1 and axes[0] in ACTIVATION_AXES
    return frozenset(PURPOSES if has_activations else (*BULK_PURPOSES[:2], "control"))


def purposes_of_all_ranks(shape: MeshShape) -> frozenset[str]:
    """Return the purposes of the group of all ranks: gradients and control, and more if it is also the group of one
    axis, or of data and sequence.
    """
    axes = shape.all_axes
    is_smaller_group = len(axes) == 1 or axes == shape.named(STATE_AXES)
    return all_purposes(axes) if is_smaller_group else frozenset({"gradients", "control"})


def united(needs: Iterable[Needs]) -> dict[tuple[str, ...], frozenset[str]]:
    """Return the union of all needs, in the order in which their axes are first named."""
    found = dict[tuple[str, ...], frozenset[str]]()
    for each in needs:
        for axes, purposes in each.items():
            found[axes] = found.get(axes, frozenset()) | purposes
    return found
