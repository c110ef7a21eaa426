"""Unsharding and resharding of units: a count of the calls in progress, and a prefetch in the order of the last step.

A unit's call is opened before its forward and closed after it. In backward it is opened by the gradient of the unit's
output and closed by the gradient of its input, or at the latest when the backward ends. It does not depend on "the last
gradient has arrived": that never happens with frozen layers, two forwards before a backward, or gradients of inputs
alone.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from partita.errors import PartitaError
from partita.memory.step_events import span
from partita.memory.streams import Event, record
from partita.sharding.placeholder import is_sharded
from partita.sharding.structure import Written
from partita.sharding.unit import Unit, UnitState
from partita.sharding.unit_events import Subscriber, UnitCall
from partita.sharding.unshard_order import UnshardOrder

_READ = "a read of a sharded parameter"


class References:
    """The references to an unsharded unit's parameters and their views, counted when ``engine.gathered`` begins.

    Args:
        version: the version of the parameters; autograd refuses graphs of other versions.
    """

    def __init__(self, unit: Unit, version: int) -> None:
        self._unit = unit
        self._version = version
        # A graph that accumulates a parameter's gradient refers to the parameter, even if it has not saved its values.
        # With these nodes there is always one such reference.
        self._nodes = [node for member in unit.members if (node := gradient_node(member.param)) is not None]
        self._before = self._count()

    def begin_again(self, version: int) -> None:
        """Begin another block while there are still more references."""
        self._version = version

    def end_block(self) -> bool:
        """End the block. Returns: True if there are more references than when it began."""
        grown = self.grown(self._version)
        self._nodes.clear()
        return grown

    def grown(self, version: int) -> bool:
        """Return whether there are more references. After an update only views count: earlier graphs are invalid."""
        (views, params), (views_before, params_before) = self._count(), self._before
        if views > views_before:
            return True
        return version == self._version and any(now > then for now, then in zip(params, params_before, strict=True))

    def _count(self) -> tuple[int, list[int]]:
        """Return the number of views, and of references to each parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            params = [member.param._use_count() for member in self._unit.members]  # type: ignore[attr-defined]
        return torch._C._storage_Use_Count(self._unit.storage._cdata), params


def gradient_node(param: torch.Tensor) -> Any:
    """Return autograd's node that accumulates the gradient; a new one has the parameter's current shape."""
    if not param.requires_grad:
        return None
    with torch.inference_mode(False), torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        view = param.view_as(param)
    assert view.grad_fn is not None
    return view.grad_fn.next_functions[0][0]


class Unsharder:
    """Unshards and reshards units; nothing else does.

    Attributes:
        subscriber: the subscriber to the events of its units.
        version: the number of changes of the parameters.
        within_batch: True if forwards and backwards of several micro-batches alternate (pipeline). Units that stay
            unsharded between forward and backward then do so until the last one, and the recorded order is that of all.

    Args:
        units: all units that are stored sharded, in the model's order.
        prefetch_bytes: the number of bytes that may be gathered ahead of the unit in use.
        written: stores values that were written into a unit before it is resharded.
    """

    def __init__(
        self, units: Sequence[Unit], unshard_order: UnshardOrder, prefetch_bytes: int, written: Written
    ) -> None:
        self.units = units
        self._unshard_order = unshard_order
        self._written = written
        self._owner = {id(member.param): unit for unit in units for member in unit.members}
        self._prefetch_bytes = prefetch_bytes
        # of the last step: each unit that was opened, with True if by a backward
        self._order: list[tuple[Unit, bool]] = []
        self._recorded: list[tuple[Unit, bool]] = []
        self._position = 0
        self._records = True
        self._warned: set[str] = set()
        self._referred: dict[Unit, References] = {}  # of units in engine.gathered, or that keep their memory since
        self._reads: list[Unit] = []  # unsharded for the user's code between forwards
        self._forward_depth = 0
        self._has_graph = False  # a forward since the last step may have a graph
        self._changed = Event()  # passes when values that were written outside of updates are stored
        self.version = 0
        self.within_batch = False
        self.subscriber = Subscriber(
            self._opened, self._closed, self._opened_backward, lambda call: self.close(call.unit), self._reshard_idle
        )

    # --------------------------------------------------------------------- calls

    def _opened(self, call: UnitCall) -> None:
        call.version = self.version
        self.open(call.unit)

    def _closed(self, call: UnitCall, has_graph: bool) -> None:
        self.close(call.unit, between=has_graph)

    def _opened_backward(self, call: UnitCall) -> None:
        self.check_version(call.version, f"unit '{call.unit.title}'")
        self.open(call.unit)
        if torch.is_grad_enabled():  # create_graph: a backward through this backward may follow
            call.unit.pinned = True

    def open(self, unit: Unit) -> None:
        """Unshard a unit, and keep it unsharded until the matching :meth:`close`."""
        unit.open_calls += 1
        self._has_graph |= torch.is_grad_enabled()
        if unit.open_calls == 1 and not unit.holds:
            if self._records:
                self._recorded.append((unit, torch._C._current_graph_task_id() != -1))
            self._follow(unit)
        if unit.state is UnitState.SHARDED:
            self._gather(unit, must=True)
        if not unit.holds:  # in engine.gathered, one rank may run the unit alone
            self._prefetch()  # before waiting for this one, so that the network is not idle
        self._finish_gather(unit)

    def close(self, unit: Unit, *, between: bool = False) -> None:
        """End a call; after the last one reshard the unit, or (``between``) bring it to its state until backward."""
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
        self._reshard(unit)
        self._prefetch()

    def _recomputes(self, unit: Unit) -> bool:
        """Return whether this forward runs inside a backward (reentrant checkpointing), which needs the unit next."""
        return torch._C._current_graph_task_id() != -1 and unit.can_unshard

    @property
    def forward_order(self) -> list[Unit]:
        """The units in the order in which the last step's forward used them first."""
        return list(dict.fromkeys(unit for unit, in_backward in self._order if not in_backward))

    def check_version(self, version: int, what: str) -> None:
        """Check the version of the parameters of a forward whose graph a backward has reached.

        Raises:
            PartitaError: the parameters were changed since that forward.
        """
        if version != self.version:
            raise PartitaError(
                f"backward reached {what} with parameters that were changed after its forward (by engine.step() or "
                "engine.gathered): run the forward again before this backward"
            )

    # ------------------------------------------------------- outside of calls

    def touched(self, params: Sequence[nn.Parameter], what: str) -> None:
        """See :class:`~partita.sharding.placeholder.Guardian`."""
        if not self.keeps_unsharded:
            self._read(params, what)
            return
        for param in params:
            unit = self._owner[id(param)]
            if unit.state is UnitState.UNSHARDED:
                continue
            if unit.title not in self._warned:
                self._warned.add(unit.title)
                warnings.warn(
                    f"parameter '{unit.name_of(param)}' is read outside the forward of its unit '{unit.title}', which "
                    "now stays unsharded until the step ends; to unshard it with its reader, name a module that "
                    "contains both in zero.units",
                    stacklevel=2,
                )
            unit.pinned = True
            self.open(unit)
            unit.open_calls -= 1

    def _read(self, params: Sequence[nn.Parameter], what: str) -> None:
        """Unshard parameters for a read or write by the user's code between forwards. A collective.

        Their units are resharded at the next such read of other units, and before a forward or a step. Only one call's
        units are unsharded at a time; graphs and views that outlive it keep the memory that they refer to.
        """
        sharded = next((param for param in params if is_sharded(param)), None)
        if sharded is None:
            return
        self._check_all_read(self._owner[id(sharded)].name_of(sharded), what)
        units = list(dict.fromkeys(self._owner[id(param)] for param in params))
        self.end_reads(but=units)
        self.hold([unit for unit in units if unit not in self._reads])
        self._reads = units

    def _check_all_read(self, fqn: str, what: str) -> None:
        try:
            self._unshard_order.synchronize(_READ)
        except PartitaError as error:
            raise PartitaError(
                f"'{what}' needs the values of parameter '{fqn}', which is sharded between uses, and not every rank "
                "asks for them: read and write parameters on every rank (not under `if rank == 0`), or take "
                f"engine.state_dict() on every rank. {error}"
            ) from error

    def is_reading(self, param: nn.Parameter) -> bool:
        """See :class:`~partita.sharding.placeholder.Guardian`."""
        return bool(self._reads) and self._owner.get(id(param)) in self._reads

    def end_reads(self, but: Sequence[Unit] = ()) -> None:
        """Reshard the units, except ``but``, that the user's code has read or written between forwards."""
        if ended := [unit for unit in self._reads if unit not in but]:
            self._reads = [unit for unit in self._reads if unit in but]
            self.release_hold(ended)

    def hold(self, units: Sequence[Unit]) -> None:
        """Unshard units outside of any forward until the matching :meth:`release_hold`, in memory beyond the pool.

        They get the exact stored values, even if compute uses quantized ones.

        Raises:
            PartitaError: a unit is in use with quantized values.
        """
        for unit in units:
            if unit.state is not UnitState.SHARDED and not (unit.planned.unshards_exactly or unit.is_exact):
                if unit.in_use and not self._is_unused(unit):
                    raise PartitaError(
                        f"unit '{unit.title}' is in use with quantized parameters (communication.parameters); exact "
                        "values are available after engine.step(), and after forwards under torch.no_grad()"
                    )
                unit.pinned = False
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

    def _is_unused(self, unit: Unit) -> bool:
        """Return whether a unit stays unsharded only because of a forward without a graph, which is over."""
        return not (unit.open_calls or unit.holds or self._has_graph or self.keeps_unsharded)

    def release_hold(self, units: Sequence[Unit]) -> None:
        """End a :meth:`hold`. Parameters that a new graph or view refers to keep their values in memory, for a later
        backward.
        """
        for unit in units:
            unit.holds -= 1
            if unit.holds == 0 and not unit.keeps_memory:
                if self._referred[unit].end_block():
                    unit.keep_memory()
                else:
                    del self._referred[unit]
        self._reshard_idle()
        self._drop_kept()

    def _drop_kept(self) -> None:
        """Free kept memory of parameters that nothing refers to any more."""
        kept = [unit for unit in self._referred if unit.keeps_memory and unit.state is UnitState.SHARDED]
        for unit in kept:
            if not self._referred[unit].grown(self.version):
                self._written.check_kept(unit)
                del self._referred[unit]
                unit.drop_memory()

    def begin_forward(self) -> None:
        """Begin a forward of the model. The order of units is recorded if it has a backward."""
        self.end_reads()
        self._records = torch.is_grad_enabled()
        if self.within_batch:
            return
        self.reset()
        if not self._records or not self._recorded:
            self._position = 0

    def forwards_under_way(self, num: int) -> None:
        """Set the number of running forwards of the model (which may call itself)."""
        self._forward_depth = num

    @property
    def keeps_unsharded(self) -> bool:
        """True if a forward of the model or a backward is running: what it reads stays unsharded until the step."""
        return self._forward_depth > 0 or torch._C._current_graph_task_id() != -1

    def reset(self) -> None:
        """Close calls that an exception left open. Called when no forward and no backward is running."""
        for unit in self.units:
            unit.open_calls = 0
        self._reshard_idle()

    def end_micro_batch(self) -> None:
        """End a micro-batch: reshard pinned units, and use the recorded order next. Synchronizes the ranks if any unit
        is sharded.
        """
        self.end_reads()
        for unit in self.units:
            unit.pinned = False
        self._has_graph = False
        self.reset()
        self._drop_kept()
        if self.units:
            self._unshard_order.step()
        if self.within_batch:
            return
        if self._recorded:
            self._order = self._recorded
            self._recorded = []
        self._position = 0

    def updated(self) -> None:
        """Note a change of the parameters: graphs of earlier forwards are invalid, and units that stayed unsharded for
        them are resharded.
        """
        self.end_reads()
        self.version += 1
        if self.units:
            self._unshard_order.updated()
        for unit in self.units:
            unit.has_secondary = False
            unit.pinned = False
        self._has_graph = False
        self._reshard_idle()
        self._drop_kept()

    def order_after_writes(self) -> None:
        """Make later gathers wait for the values that code outside of steps has written on the current stream. (Those
        that a step publishes have an event per unit.)
        """
        if self.units:
            self._changed = record(self.units[0].storage.device)

    def _reshard_idle(self) -> None:
        if self.within_batch:  # idle units stay unsharded, or were prefetched for the next micro-batch
            return
        for unit in self.units:
            if not unit.in_use and unit.state is not UnitState.SHARDED:
                self._evict(unit)

    def _evict(self, unit: Unit) -> None:
        self._finish_gather(unit)
        self._reshard(unit)

    def _reshard(self, unit: Unit) -> None:
        try:
            self._written.take_from(unit)
            if unit.keeps_memory:
                self._written.note_kept(unit)
        finally:
            unit.reshard()

    # ----------------------------------------------------------------- prefetch

    def _gather(self, unit: Unit, *, must: bool, spare: bool = False, exact: bool = False) -> bool:
        """Start a gather. Returns False if the pool is full.

        Args:
            must: if the pool is full, reshard idle units first; then the gather always starts.
            spare: allow memory beyond the pool.
            exact: gather the exact stored values.
        """
        if must and not unit.can_unshard:
            for idle in self.units:
                if not idle.in_use and idle.state is not UnitState.SHARDED and idle is not unit:
                    self._evict(idle)
        elif not must and not unit.can_unshard:
            return False
        if unit.keeps_memory:
            self._written.check_kept(unit)
        try:
            self._unshard_order.gathers(unit.number)
        except PartitaError:
            self._order = []  # the ranks differ: prefetch nothing while calls are closed
            raise
        unit.start_unshard(spare, exact, self._changed)
        return True

    def _finish_gather(self, unit: Unit) -> None:
        if unit.state is UnitState.UNSHARDING:
            with span("wait for gather", unit.title):
                self._unshard_order.wait(unit.gathered)
                unit.finish_unshard()

    def _follow(self, unit: Unit) -> None:
        """Move the position in the last step's order past this unit, if the unit is ahead."""
        for place in range(self._position, len(self._order)):
            if self._order[place][0] is unit:
                self._position = place + 1
                return

    def _prefetch(self) -> None:
        """Gather units ahead in the last step's order, up to the allowed bytes; a backward's only if one follows."""
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
