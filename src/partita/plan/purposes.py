"""The purposes of what ranks send each other. Each has connections of its own, so no order between them has to be kept.

Parameters are unsharded, gradients reduced, activations exchanged in forward and backward, and control messages tell of
all of it. Only the last are always small, and go over every group.
"""

from collections.abc import Iterable, Mapping

from partita.plan.mesh_shape import ACTIVATION_AXES, STATE_AXES, MeshShape

PURPOSES = ("parameters", "gradients", "activations", "control")
BULK_PURPOSES = PURPOSES[:3]
# By the axes of a group, what it is needed for beside control messages.
Needs = Mapping[tuple[str, ...], frozenset[str]]


def all_purposes(axes: tuple[str, ...]) -> frozenset[str]:
    """Return every purpose that the ranks along ``axes`` may have: activations along single axes alone."""
    has_activations = len(axes) == 1 and axes[0] in ACTIVATION_AXES
    return frozenset(BULK_PURPOSES if has_activations else BULK_PURPOSES[:2])


def purposes_of_all_ranks(shape: MeshShape) -> frozenset[str]:
    """Return the purposes of the group of all ranks: of what is summed over all, if it is no smaller group, too."""
    axes = shape.all_axes
    is_smaller_group = len(axes) == 1 or axes == shape.named(STATE_AXES)
    return all_purposes(axes) if is_smaller_group else frozenset({"gradients"})


def united(needs: Iterable[Needs]) -> dict[tuple[str, ...], frozenset[str]]:
    """Return all needs together, in the order in which their axes are first named."""
    found = dict[tuple[str, ...], frozenset[str]]()
    for each in needs:
        for axes, purposes in each.items():
            found[axes] = found.get(axes, frozenset()) | purposes
    return found
