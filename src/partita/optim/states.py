"""The parameters as the optimizer sees them: views of this rank's master weights, and their optimizer states.

If the optimizer sees parameters unsharded, a view has the parameter's shape; else it is this rank's flat slice (empty
if it has none). Views replace the user's parameters in the optimizer's groups, so per-group rates, schedulers and hooks
work unchanged.

An optimizer may keep any states. On the disk tier every tensor with one value per element of the parameter is stored on
disk, whatever its key, and is in the optimizer only during an update; counters and other values stay in memory.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any
from urllib.parse import quote, unquote

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from partita.errors import ConfigError
from partita.kernels.quantize import decode_signed, decode_unsigned
from partita.kernels.state import num_blocks
from partita.layout.off_stage import is_off_stage
from partita.layout.parameters import ParameterInfo
from partita.memory.accelerator import host_of
from partita.memory.allocate import trim
from partita.memory.tiers import Lease, StateMemory, StoredState
from partita.sharding.parameter import Member
from partita.sharding.segment import Segment
from partita.sharding.unit import Unit
from partita.table.residence import BLOCK, SPLIT, Tier
from partita.table.span import Span


class View:
    """This rank's master weights of one parameter, as the optimizer sees them.

    Attributes:
        start: the index of its first element in the parameter.
        offset: the index of its first element in this rank's master weights of the segment.
        only_during_update: True if the view has memory only during an update.
        in_groups: the tensor that stands for the parameter in the optimizer's groups, and is the key of its states:
            ``tensor``, or the full parameter at its owner; None if this rank has neither.
        is_full_at_owner: True if the optimizer runs on the full parameter, at its owner.

    Args:
        span: the parameter's span among the segment's ``master_spans``; None if this rank has no slice of it.
    """

    def __init__(self, member: Member, span: Span | None) -> None:
        self.member = member
        self.start = span.start if span else 0
        self.num_elements = span.num_elements if span else 0
        self.offset = span.offset if span else 0
        segment = member.segment
        master = segment.plan.master
        self.only_during_update = master.tier is Tier.DISK or master.encoding == SPLIT
        device = segment.full.device
        where = device if master.tier is Tier.DEVICE else host_of(device)
        self.tensor = nn.Parameter(torch.empty(0, dtype=torch.float32, device=where), requires_grad=True)
        self.in_groups: Tensor | None = self.tensor if self.num_elements else None
        self.is_full_at_owner = False
        if segment.master is not None and not self.only_during_update:
            self.connect(segment.master.lease().tensor)

    def over(self, flat: Tensor) -> Tensor:
        """Return this view's elements of a flat state of its segment on this rank, in the view's shape."""
        return self.at(flat, self.offset)

    def at(self, flat: Tensor, offset: int) -> Tensor:
        """Return this view's elements of a flat tensor that has them from ``offset`` on, in the view's shape."""
        return self._shaped(flat, offset)

    def slice_of(self, flat: Tensor) -> Tensor:
        """Return this view's elements of a parameter's flat values ``[numel]``, in the view's shape."""
        return self._shaped(flat, self.start)

    def _shaped(self, flat: Tensor, start: int) -> Tensor:
        part = flat[start : start + self.num_elements]
        return self.member.shaped(part) if self.member.segment.has_full_master else part

    def blocks_at(self, flat: Tensor, offset: int) -> Tensor:
        """Return this view's elements, as :meth:`at`, of a state with one value per block."""
        first = offset // BLOCK
        return flat[first : first + -(-self.num_elements // BLOCK)]

    def connect(self, master: Tensor) -> None:
        """Point the view at the segment's master weights."""
        with torch.no_grad():
            self.tensor.data = self.over(master)

    def disconnect(self) -> None:
        """Remove the view's memory, as before :meth:`connect`."""
        with torch.no_grad():
            self.tensor.data = self.tensor.new_empty(0, dtype=torch.float32)


class Views:
    """All views, by parameter.

    Args:
        others: parameters in no unit of this rank: they leave the optimizer's groups, except the names of those on
            other pipeline stages.
    """

    def __init__(self, units: Sequence[Unit], memory: StateMemory, others: Iterable[ParameterInfo] = ()) -> None:
        self._memory = memory
        self._known = {id(member.param) for unit in units for member in unit.members}
        self._known |= {id(info.param) for info in others}
        self._off_stage = {id(h.param): h.fqns[0] for h in others if is_off_stage(h.param)}
        spans = {span.fqn: span for unit in units for segment in unit.segments for span in segment.master_spans}
        members = [member for unit in units for member in unit.members if member.param.is_floating_point()]
        self._views = {id(member.param): View(member, spans.get(member.fqn)) for member in members}
        # The parameters of each group, including those that this rank has no slice of.
        self.names_in_groups = defaultdict[int, list[str]](list)
        self._groups = dict[int, int]()  # the number of each view's group, by the view's id
        self._by_segment = defaultdict[int, list[View]](list)
        for view in self:
            self._by_segment[id(view.member.segment)].append(view)

    def __iter__(self) -> Iterator[View]:
        return iter(self._views.values())

    def of_segment(self, segment: Segment) -> list[View]:
        """Return the views of a segment's parameters."""
        return self._by_segment.get(id(segment), [])

    def group_of(self, view: View) -> int | None:
        """Return the number of the optimizer's group that the view's parameter belongs to; None if it is in none."""
        return self._groups.get(id(view))

    def of(self, param: Tensor) -> View | None:
        """Return the view of a parameter; None if it is in no unit of this rank."""
        return self._views.get(id(param))

    def attach(self, optimizer: Optimizer) -> None:
        """Replace the user's parameters by views in every group, and slice the states that the optimizer already has.

        Parameters without a slice on this rank leave the group. Call it again to handle added groups.

        Raises:
            ConfigError: a group has a tensor that is not a parameter of the model, or that is also in another group.
        """
        by_tensor = {id(view.in_groups): view for view in self}
        if all(id(param) in by_tensor for group in optimizer.param_groups for param in group["params"]):
            return
        check_groups(optimizer, self._known | by_tensor.keys())
        for number, group in enumerate(optimizer.param_groups):
            params = []
            for param in group["params"]:
                view = by_tensor.get(id(param)) or self.of(param)
                if view is None:
                    if (name := self._off_stage.get(id(param))) is not None:
                        self.names_in_groups[number].append(name)
                    optimizer.state.pop(param, None)
                    continue
                if param is not view.in_groups:
                    self._add_to_group(number, view)
                    state = optimizer.state.pop(param, None)
                    if state and view.in_groups is not None:
                        optimizer.state[view.in_groups] = (
                            _moved(state, view.tensor.device) if view.is_full_at_owner else self._cut(state, view)
                        )
                if view.in_groups is not None:
                    params.append(view.in_groups)
            group["params"][:] = params  # the list itself: LBFGS keeps a reference to it

    def _add_to_group(self, number: int, view: View) -> None:
        if id(view) in self._groups:
            raise ConfigError(
                f"optimizer group {number} contains '{view.member.fqn}', which is also in an earlier group"
            )
        self._groups[id(view)] = number
        self.names_in_groups[number].append(view.member.fqn)

    def _cut(self, state: dict[str, object], view: View) -> dict[str, object]:
        """Return the view's slice of a state that was created before the engine, for the global parameter or for this
        rank's local tensor.
        """
        member, place = view.member, view.member.span.place

        def cut(value: object) -> object:
            if not isinstance(value, Tensor) or value.dim() == 0:
                return value
            if place.is_part and tuple(value.shape) == place.shape:
                value = place.take(value)
            if tuple(value.shape) != tuple(member.shape):
                return value
            return view.slice_of(member.flat(value)).to(view.tensor.device, copy=True)

        return {key: cut(value) for key, value in state.items()}

    def unfreeze(self, segment: Segment) -> None:
        """Create master weights for a segment that begins to train, if it has none, and connect its views."""
        if segment.master is not None:
            return
        master = segment.make_master(self._memory)
        for view in self.of_segment(segment):
            if not view.only_during_update:
                view.connect(master.lease().tensor)


def check_groups(optimizer: Optimizer, known: AbstractSet[int]) -> None:
    """Check that an optimizer has only tensors with ``known`` ids.

    Raises:
        ConfigError: a group has a tensor that is not a parameter of the model.
    """
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in known:
                raise ConfigError(
                    f"optimizer group {number} contains a tensor of shape {tuple(param.shape)} that is not a parameter "
                    "of the model; build the optimizer on model.parameters(). If it is a parameter of the loss, make "
                    "the loss a submodule of the model that is passed to partita.initialize, which calls it in forward"
                )


# The brackets of a place in a list, a tuple or a dictionary.
_BRACKETS: dict[Any, tuple[str, str]] = {list: ("[", "]"), tuple: ("(", ")"), dict: ("{", "}")}
_PLACE = re.compile(r"([\[({])(\w+|=[\w%~-]+)[\])}]$")


def flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's state with the items of containers that have tensors, under keys such as 'Q[0]'.

    Other containers are values: those without tensors, and dictionaries with keys other than numbers, text and tuples
    of them.
    """
    found = dict[str, Any]()
    for key, value in state.items():
        places = _places(value) if type(value) in _BRACKETS and has_tensors(value) else None
        if places is None:
            found[key] = value
            continue
        opening, closing = _BRACKETS[type(value)]
        found |= flattened({f"{key}{opening}{place}{closing}": item for place, item in places})
    return found


def has_tensors(value: object) -> bool:
    """Return whether a value is a tensor, or a container with tensors."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, Tensor) or any(map(has_tensors, items))


def _places(value: Any) -> list[tuple[str, Any]] | None:
    """Return the items of a container, each with its place; None if a place cannot be written as text."""
    if not isinstance(value, dict):
        return [(str(number), item) for number, item in enumerate(value)]
    places = [(place, item) for key, item in value.items() if (place := _written(key)) is not None]
    return places if len(places) == len(value) else None


def _written(key: Any) -> str | None:
    """Return a dictionary's key as text: a word as it is, another literal escaped, without periods, after '='.

    Keys of checkpoints have a period only before the name of a state. Return None for keys that are not literals.
    """
    if isinstance(key, str) and re.fullmatch(r"\w+", key):
        return key
    try:
        is_literal = type(ast.literal_eval(repr(key))) is type(key)
    except (SyntaxError, TypeError, ValueError):
        return None
    return "=" + quote(repr(key), safe="").replace(".", "%2E") if is_literal else None


def _read(place: str) -> Any:
    """Return the key that :func:`_written` wrote."""
    return ast.literal_eval(unquote(place[1:])) if place.startswith("=") else place


def _moved(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a state with its tensors on a device; numbers, such as step counters, stay where they are."""
    has_dims = {key: isinstance(value, Tensor) and value.dim() > 0 for key, value in flattened(state).items()}
    return unflattened({key: v.to(device) if has_dims[key] else v for key, v in flattened(state).items()})


def unflattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that :func:`flattened` was made of."""
    depth = max(map(_depth, state), default=0)
    found, items = dict[str, Any](), dict[tuple[str, str], dict[str, Any]]()
    for key, value in state.items():  # the innermost containers first
        if depth and _depth(key) == depth:
            match = _PLACE.search(key)
            assert match is not None
            items.setdefault((key[: match.start()], match[1]), {})[match[2]] = value
        else:
            found[key] = value
    for (key, opening), values in items.items():
        in_order = [values[str(place)] for place in range(len(values))] if opening != "{" else []
        by_key = {_read(place): value for place, value in values.items()} if opening == "{" else {}
        found[key] = {"[": in_order, "(": tuple(in_order), "{": by_key}[opening]
    return unflattened(found) if depth else found


def _depth(key: str) -> int:
    """Return the number of containers that a key of :func:`flattened` is in."""
    depth = 0
    while (match := _PLACE.search(key)) is not None:
        key, depth = key[: match.start()], depth + 1
    return depth


# States with one value per block of the parameter.
BLOCK_STATES = ("exp_avg_scale", "exp_avg_sq_scale")
# All states of 8-bit moments: codes, and the scales of their blocks.
BLOCK_MOMENTS = frozenset({"exp_avg", "exp_avg_sq", *BLOCK_STATES})

# Leases of a segment's states on disk, by key.
Leases = dict[str, Lease]


class OptimizerStates:
    """The optimizer states of all parameters."""

    def __init__(self, optimizer: Optimizer, views: Views, memory: StateMemory) -> None:
        self._optimizer = optimizer
        self._views = views
        self._memory = memory
        self._on_disk: dict[int, DiskStates] = {}
        self._num_counted = -1

    def on_disk(self, segment: Segment) -> "DiskStates | None":
        """Return the states of a segment's parameters on disk; None if they are stored in memory."""
        if segment.plan.moments.tier is not Tier.DISK:
            return None
        if id(segment) not in self._on_disk:
            self._on_disk[id(segment)] = DiskStates(
                segment, self._views.of_segment(segment), self._optimizer.state, self._memory
            )
        return self._on_disk[id(segment)]

    def of(self, view: View) -> dict[str, Any]:
        """Return the states of one parameter, decoded."""
        state = {} if view.in_groups is None else dict(self._optimizer.state.get(view.in_groups, {}))
        if (disk := self.on_disk(view.member.segment)) is not None:
            state.update(disk.load(view))
        return decoded(state)

    def count(self) -> None:
        """Update the ledger with the bytes of the states in memory, without step counters."""
        num_states = sum(len(state) for state in self._optimizer.state.values())
        if num_states == self._num_counted:
            return
        self._num_counted = num_states
        held = Counter[Tier]()
        for view in self._views:
            state = {} if view.in_groups is None else self._optimizer.state.get(view.in_groups, {})
            for key, value in flattened(state).items():
                if isinstance(value, Tensor) and key != "step":
                    held[view.member.segment.plan.moments.tier] += value.nbytes
        for tier, num_bytes in held.items():
            if tier is not Tier.DISK:
                self._memory.ledger.set("moments", num_bytes, tier)


class DiskStates:
    """The optimizer states of one segment on the disk tier.

    Args:
        state: the optimizer's ``state``.
    """

    def __init__(
        self, segment: Segment, views: list[View], state: dict[Tensor, dict[str, Any]], memory: StateMemory
    ) -> None:
        self._views = views
        self._state = state
        self._memory = memory
        self._num_elements = segment.plan.master.num_elements(segment.layout.padded, segment.mesh)
        self._kept: dict[str, StoredState] = {}
        self._offsets: dict[str, dict[int, int]] = {}  # of the views in each state, by key and the view's id

    def _keep(self, key: str, dtype: torch.dtype) -> StoredState:
        """Allocate a state, in the layout of the segment.

        Parameters that have other states, but not this one, take no space in it (matrices and vectors under Muon).
        """
        without = {id(view) for view in self._views if (s := self._state.get(view.tensor)) and key not in s}
        offsets, num_elements = {}, 0
        for view in self._views:
            if id(view) not in without:
                offsets[id(view)] = num_elements if without else view.offset
                num_elements += -(-view.num_elements // BLOCK) * BLOCK
        if not without:
            num_elements = self._num_elements
        self._offsets[key] = offsets
        num_values = num_blocks(num_elements) if key in BLOCK_STATES else num_elements
        self._kept[key] = self._memory.keep("moments", num_values, dtype, Tier.DISK)
        return self._kept[key]

    def _place(self, key: str, view: View, values: Tensor) -> Tensor:
        """Return a parameter's slice of a state's values."""
        offset = self._offsets[key][id(view)]
        return view.blocks_at(values, offset) if key in BLOCK_STATES else view.at(values, offset)

    def lease(self) -> Leases:
        """Start to read the states."""
        return {key: kept.lease() for key, kept in self._kept.items()}

    def load(self, view: View) -> dict[str, Tensor]:
        """Return a copy of one parameter's states on disk."""
        state = self._state.get(view.tensor, {})
        on_disk = {key: kept for key, kept in self._kept.items() if _is_on_disk(state.get(key))}
        return {key: self._place(key, view, kept.load()).clone() for key, kept in on_disk.items()}

    def connect(self, leases: Leases) -> None:
        """Put the states into the optimizer."""
        for key, lease in leases.items():
            values = lease.wait()
            for view in self._views:
                if _is_on_disk(self._state.get(view.tensor, {}).get(key)):
                    self._state[view.tensor][key] = self._place(key, view, values)

    def replace(self) -> None:
        """Store the states that are in the optimizer now, in place of earlier ones."""
        self.put_back({key: kept.lease(read=False) for key, kept in self._kept.items()})

    def put_back(self, leases: Leases, *, changed: bool = True) -> None:
        """Take all states out of the optimizer, including new ones, write them if they have ``changed``, and end the
        leases.
        """
        known = len(leases)
        for view in self._views:
            for key, value in self._state.get(view.tensor, {}).items():
                if isinstance(value, Tensor) and value.dim() > 0 and value.numel() > 0:
                    if key not in leases:
                        leases[key] = self._keep(key, value.dtype).lease(read=False)
                    if id(view) not in self._offsets[key]:  # the parameter has got another kind of state: in memory
                        continue
                    place = self._place(key, view, leases[key].tensor)
                    if place.data_ptr() != value.data_ptr():
                        place.copy_(value)
                    self._state[view.tensor][key] = value.new_empty(0)
        for lease in leases.values():
            lease.end(changed=changed)
        if len(leases) > known:  # the optimizer has created states
            trim()


def _is_on_disk(state: object) -> bool:
    """Return whether a state's values are on disk. (All states of a parameter with one element stay in memory.)"""
    return isinstance(state, Tensor) and state.numel() == 0


def decoded(state: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's state with 8-bit moments decoded."""
    if any(key not in state for key in BLOCK_MOMENTS):
        return state
    first, second = state["exp_avg"], state["exp_avg_sq"]
    first_scale, second_scale = (state[key] for key in BLOCK_STATES)
    numbers = {
        "exp_avg": decode_signed(flat(first), first_scale).as_strided(first.shape, first.stride()),
        "exp_avg_sq": decode_unsigned(flat(second), second_scale).as_strided(second.shape, second.stride()),
    }
    return {**{key: value for key, value in state.items() if key not in BLOCK_STATES}, **numbers}


def flat(values: Tensor) -> Tensor:
    """Return a flat view of a dense tensor's values in memory order."""
    return values.as_strided((values.numel(),), (1,), values.storage_offset())
