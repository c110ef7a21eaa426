"""Views of sharded parameters that the user's code still holds when a forward has ended."""

import gc
import warnings
from collections.abc import Sequence
from types import FrameType

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from partita.sharding.unit import Unit


def warn_of_kept_views(units: Sequence[Unit]) -> None:
    """Warn of one view of a parameter of these units that somebody holds.

    A view in a global list, say, reads memory that the unit gives back: torch does not check this, and the process may
    end. Those that modules keep as attributes, and those in outputs, are copies by now. All objects of the process are
    looked at: call it once.
    """
    units_by_storage = {unit.storage._cdata: unit for unit in units}
    own = {id(segment.full) for unit in units for segment in unit.segments}
    views = tuple(
        item
        for item in gc.get_objects()
        if type(item) is Tensor
        and item.layout is torch.strided
        and item.untyped_storage()._cdata in units_by_storage
        and id(item) not in own
    )
    for view in views:
        holders = [holder for holder in gc.get_referrers(view) if holder is not views and type(holder) is not FrameType]
        if any(_is_saved(holder) for holder in holders):  # read in backward, where the parameter is whole
            continue
        held_by = f" by a {type(holders[0]).__name__}" if holders else ""
        title = units_by_storage[view.untyped_storage()._cdata].title
        warnings.warn(
            f"a view, of shape {tuple(view.shape)}, of a parameter of '{title}' is held{held_by} after the forward: "
            "the parameter is sharded between its uses, when the memory of its views is gone, and reading one may end "
            "the process; keep a copy (view.clone())",
            stacklevel=2,
        )
        return


def _is_saved(holder: object) -> bool:
    """Whether this is a graph's node of an autograd.Function, or its attributes."""
    return any(issubclass(type(item), BackwardCFunction) for item in [holder, *gc.get_referrers(holder)])
