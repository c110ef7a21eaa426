"""When a unit is whole: a count of open visits, and a prefetch that follows the order of the last step.

A visit is opened by a unit's forward and closed at its end; in backward it is opened by the gradient of the unit's
output and closed by the gradient of its input, and whatever is still open when a backward ends is closed then. "The
last gradient has arrived" plays no part in it: that moment does not come with frozen layers, two forwards before a
backward, or gradients of inputs alone.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from partita.errors import PartitaError
from partita.memory.step_events import span
from partita.sharding.structure import Written
from partita.sharding.unit import Unit, UnitState
from partita.sharding.unit_events import Subscriber, UnitCall
from partita.sharding.unshard_order import UnshardOrder


class References:
    """References to the parameters of an unsharded unit, and to views of them, when ``engine.gathered`` begins.

    Args:
        version: of the parameters; autograd refuses graphs that were made with others.
    """

    def __init__(self, unit: Unit, version: int) -> None:
        self._unit = unit
        self._version = version
        # A graph that adds to a parameter's gradient refers to it, whether or not it has saved its values. With these
        # nodes there is one such reference throughout.
        self._nodes = [node for member in unit.members if (node := gradient_node(member.param)) is not None]
        self._before = self._count()

    def begin_again(self, version: int) -> None:
        """Another block begins while there are more references."""
        self._version = version

    def end_block(self) -> bool:
        """End the block. Returns: True if there are more references than when it began."""
        grown = self.grown(self._version)
        self._nodes.clear()
        return grown

    def grown(self, version: int) -> bool:
        """True if there are more references; after an update only views count, graphs are void then."""
        (views, params), (views_before, params_before) = self._count(), self._before
        if views > views_before:
            return True
        return version == self._version and any(now > then for now, then in zip(params, params_before, strict=True))

    def _count(self) -> tuple[int, list[int]]:
        """Numbers of views, and of references to each parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            params = [member.param._use_count() for member in self._unit.members]  # type: ignore[attr-defined]
        return torch._C._storage_Use_Count(self._unit.storage._cdata), params


def gradient_node(param: torch.Tensor) -> Any:
    """The node of autograd's graphs that adds to the gradient; a new one has the parameter's shape of now."""
    if not param.requires_grad:
        return None
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        view = param.view_as(param)
    assert view.grad_fn is not None
    return view.grad_fn.next_functions[0][0]


class Unsharder:
    """Opens and closes units; the only caller of their gathers and releases.

    Attributes: ``subscriber`` to the events of its units; ``version``: how often parameters were changed;
    ``within_batch``: forwards and backwards of several micro-batches take turns, so what stays whole between forward
    and backward does so until the last, and the order is learned of them all.

    Args:
        units: all units that do not rest whole, in the model's order.
        prefetch_bytes: how many bytes may be gathered ahead of the unit in use.
        written: stores what was written into a unit before it is released.
    """

    def __init__(self, units: Sequence[Unit], agreement: UnshardOrder, prefetch_bytes: int, written: Written) -> None:
        self.units = units
        self._agreement = agreement
        self._written = written
        self._owner = {id(member.param): unit for unit in units for member in unit.members}
        self._prefetch_bytes = prefetch_bytes
        self._order: list[tuple[Unit, bool]] = []  # of the last step: each unit opened, and whether by a backward
        self._recorded: list[tuple[Unit, bool]] = []
        self._position = 0
        self._records = True
        self._warned: set[str] = set()
        self._referred: dict[Unit, References] = {}  # of units that are held, or keep their memory since
        self._forward_depth = 0
        self.version = 0
        self.within_batch = False
        self.subscriber = Subscriber(
            self._opened, self._closed, self._opened_backward, lambda visit: self.close(visit.unit), self._rest_idle
        )

    # -------------------------------------------------------------------- visits

    def _opened(self, visit: UnitCall) -> None:
        visit.version = self.version
        self.open(visit.unit)

    def _closed(self, visit: UnitCall, has_graph: bool) -> None:
        self.close(visit.unit, between=has_graph)

    def _opened_backward(self, visit: UnitCall) -> None:
        self.check_version(visit.version, f"unit '{visit.unit.title}'")
        self.open(visit.unit)
        if torch.is_grad_enabled():  # create_graph: a backward of this one may come
            visit.unit.pinned = True

    def open(self, unit: Unit) -> None:
        """Make a unit whole and keep it so until the matching :meth:`close`."""
        unit.open_calls += 1
        if unit.open_calls == 1 and not unit.holds:
            if self._records:
                self._recorded.append((unit, torch._C._current_graph_task_id() != -1))
            self._follow(unit)
        if unit.state is UnitState.SHARDED:
            self._gather(unit, must=True)
        if not unit.holds:  # what is held may be run by one rank alone
            self._prefetch()  # before this one is waited for: a network stands idle where nothing follows it
        self._finish_gather(unit)

    def close(self, unit: Unit, *, between: bool = False) -> None:
        """End a visit; at the last one the unit goes to rest, or (``between``) to where it waits for its backward."""
        assert unit.open_calls > 0
        unit.open_calls -= 1
        if unit.in_use or unit.state is not UnitState.UNSHARDED:
            return
        if between:
            unit.keep_secondary()
            if unit.stays_unsharded or self._recomputes(unit):
                return
        if self.within_batch and unit.stays_unsharded:
            return
        self._release(unit)
        self._prefetch()

    def _recomputes(self, unit: Unit) -> bool:
        """Return whether this forward runs inside a backward (reentrant checkpointing), which needs the unit again at
        once.
        """
        return torch._C._current_graph_task_id() != -1 and unit.can_unshard

    @property
    def forward_order(self) -> list[Unit]:
        """The units in the order in which the last step's forward opened them first."""
        return list(dict.fromkeys(unit for unit, in_backward in self._order if not in_backward))

    def check_version(self, version: int, what: str) -> None:
        """A backward has reached the graph of a forward.

        Raises:
            PartitaError: the parameters were changed since that forward.
        """
        if version != self.version:
            raise PartitaError(
                f"backward reached {what} with parameters that were changed after its forward (by engine.step() or "
                "engine.gathered): run the forward again before this backward"
            )

    # ---------------------------------------------------------------- otherwise

    def touched(self, param: nn.Parameter, what: str) -> None:
        """A sharded parameter's data is asked for (see :class:`~partita.sharding.placeholder.Guardian`)."""
        unit = self._owner[id(param)]
        fqn = next(member.fqn for member in unit.members if member.param is param)
        if not self._forward_depth:
            raise PartitaError(
                f"parameter '{fqn}' is at rest: its data is split over the ranks between uses ({what} needs it); "
                f"read or write it inside `with engine.gathered(...)`"
            )
        if unit.title not in self._warned:
            self._warned.add(unit.title)
            warnings.warn(
                f"parameter '{fqn}' is read outside the forward of its unit '{unit.title}', which now stays whole "
                "until the step ends; to gather it with its reader, name a module that contains both in zero.units",
                stacklevel=2,
            )
        unit.pinned = True
        self.open(unit)
        unit.open_calls -= 1

    def hold(self, units: Sequence[Unit]) -> None:
        """Make units whole outside of any forward, in memory beyond the pool's, until the matching :meth:`let_go`: as
        they rest, also where what is computed with is decoded.

        Raises:
            PartitaError: a unit is in use as it was decoded.
        """
        for unit in units:
            if unit.state is not UnitState.SHARDED and not (unit.planned.unshards_exactly or unit.is_exact):
                if unit.in_use:
                    raise PartitaError(
                        f"unit '{unit.title}' is in use with parameters that came as codes (communication.parameters); "
                        "whole values are there outside of forward and backward"
                    )
                self._evict(unit)
        for unit in units:
            unit.holds += 1
            if unit.state is UnitState.SHARDED:
                self._gather(unit, must=True, spare=True, exact=True)
        for unit in units:
            self._finish_gather(unit)
            if unit.keeps_memory:
                self._referred[unit].begin_again(self.version)
            elif unit.holds == 1:
                self._referred[unit] = References(unit, self.version)

    def let_go(self, units: Sequence[Unit]) -> None:
        """End a :meth:`hold`. Parameters that a graph, or a view, made meanwhile refers to keep their values in memory,
        for a later backward.
        """
        for unit in units:
            unit.holds -= 1
            if unit.holds == 0 and not unit.keeps_memory:
                if self._referred[unit].end_block():
                    unit.keep_memory()
                else:
                    del self._referred[unit]
        self._rest_idle()
        self._drop_kept()

    def _drop_kept(self) -> None:
        """Free the memory of parameters that nothing refers to any more."""
        kept = [unit for unit in self._referred if unit.keeps_memory and unit.state is UnitState.SHARDED]
        for unit in kept:
            if not self._referred[unit].grown(self.version):
                del self._referred[unit]
                unit.drop_memory()

    def begin_forward(self) -> None:
        """A forward of the whole model begins. The next step's order is learned from those that have a backward."""
        self._records = torch.is_grad_enabled()
        if self.within_batch:
            return
        self.reset()
        if not self._records or not self._recorded:
            self._position = 0

    def forwards_under_way(self, num: int) -> None:
        """So many forwards of the whole model are under way (it may call itself)."""
        self._forward_depth = num

    def reset(self) -> None:
        """Close what an exception left open. Called when no forward and no backward is under way."""
        for unit in self.units:
            unit.open_calls = 0
        self._rest_idle()

    def end_micro_batch(self) -> None:
        """The end of a micro-batch: what was pinned goes to rest, the recorded order is the next one. Where anything
        is gathered, the ranks meet here.
        """
        for unit in self.units:
            unit.pinned = False
        self.reset()
        self._drop_kept()
        if self.units:
            self._agreement.step()
        if self.within_batch:
            return
        if self._recorded:
            self._order = self._recorded
            self._recorded = []
        self._position = 0

    def updated(self) -> None:
        """Parameters were changed: graphs of earlier forwards are void, and units that stayed gathered for them are
        released.
        """
        self.version += 1
        for unit in self.units:
            unit.has_secondary = False
            unit.pinned = False
        self._rest_idle()
        self._drop_kept()

    def _rest_idle(self) -> None:
        if self.within_batch:  # what is idle stays whole, or was gathered ahead for the next micro-batch
            return
        for unit in self.units:
            if not unit.in_use and unit.state is not UnitState.SHARDED:
                self._evict(unit)

    def _evict(self, unit: Unit) -> None:
        self._finish_gather(unit)
        self._release(unit)

    def _release(self, unit: Unit) -> None:
        try:
            self._written.take_from(unit)
        finally:
            unit.reshard()

    # ----------------------------------------------------------------- prefetch

    def _gather(self, unit: Unit, *, must: bool, spare: bool = False, exact: bool = False) -> bool:
        """Start a gather; where the pool is full, idle units make room first if it ``must`` be, and ``spare`` memory
        may serve. ``exact``: as it rests.
        """
        if must and not unit.can_unshard:
            for idle in self.units:
                if not idle.in_use and idle.state is not UnitState.SHARDED and idle is not unit:
                    self._evict(idle)
        elif not must and not unit.can_unshard:
            return False
        self._agreement.gathers(unit.number)
        unit.start_unshard(spare, exact)
        return True

    def _finish_gather(self, unit: Unit) -> None:
        if unit.state is UnitState.UNSHARDING:
            with span("wait for gather", unit.title):
                self._agreement.wait(unit.gathered)
                unit.finish_unshard()

    def _follow(self, unit: Unit) -> None:
        """Move to this unit's place in the last step's order; leave the position alone where it has none ahead."""
        for place in range(self._position, len(self._order)):
            if self._order[place][0] is unit:
                self._position = place + 1
                return

    def _prefetch(self) -> None:
        """Gather ahead, in the last step's order, as many bytes as allowed; for a backward only where one will come."""
        ahead, place = 0, self._position
        while place < len(self._order):
            unit, in_backward = self._order[place]
            if in_backward and not self._records:
                return
            if not unit.in_use:
                ahead += unit.planned.num_bytes
                if ahead > self._prefetch_bytes:
                    return
                if unit.state is UnitState.SHARDED and not self._gather(unit, must=False):
                    return
            place += 1
