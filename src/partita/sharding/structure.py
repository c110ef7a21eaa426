"""Detection of the user's changes to the model: replaced modules, and values written into parameters in place.

Examples of writes are ``load_state_dict``, a clamp, a copy of averages, a momentum encoder that is updated in forward,
and weights that forward normalizes. Written values are kept, as in one process. A write is found by the parameter's
version counter, or, through its ``data``, by a checksum.
"""

import sys
import warnings
import weakref
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import FrameType

import torch
from torch import Tensor, nn

from partita.errors import PartitaError
from partita.layout.parameters import find_all_parameters, find_quantized_params
from partita.memory import accelerator
from partita.memory.streams import record
from partita.sharding.parameter import Member
from partita.sharding.placeholder import ShardedParameter, ShardedValues
from partita.sharding.segment import Segment
from partita.sharding.unit import Unit, UnitState

_SUMMED = 1 << 18  # elements that a checksum multiplies at a time; the same on all ranks, which compare checksums
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2**64 / golden ratio, as a signed number: its multiples are spread evenly


@dataclass
class _Exposed:
    """A parameter whose ``data`` was read: the checksum of its values, and the returned tensors."""

    unit: Unit
    member: Member
    sum: Tensor
    tensors: list[weakref.ref[Tensor]] = field(default_factory=list)

    @property
    def is_alive(self) -> bool:
        """True if the parameter may still be written through one of the tensors."""
        return any(tensor() is not None for tensor in self.tensors)

    @property
    def is_written(self) -> bool:
        return int(accelerator.read(checksum(self.member.values))) != int(accelerator.read(self.sum))


class Written:
    """Finds parameters that were written since the engine itself changed them, and stores the written values.

    Checksums of written values are kept until the ranks have compared them (:meth:`agreed`).

    Args:
        units: all units of the model.
        rank: this process's rank; rank 0 warns.
    """

    def __init__(self, units: Sequence[Unit], rank: int) -> None:
        self._warns = rank == 0
        self._sharded = [unit for unit in units if not unit.always_unsharded]
        pairs = [(unit, member) for unit in units if unit.always_unsharded for member in unit.members]
        self._unit_of = {id(member): unit for unit, member in pairs}
        self._always_unsharded = [member for _, member in pairs if _has_owner(member.segment)]
        self._versions = dict[int, int]()  # by the member's id; unknown until the first note()
        self._exposed = dict[int, _Exposed]()  # by the member's id
        self._sums = dict[str, Tensor]()
        self._kept = dict[Unit, Tensor]()  # checksums of the memory that sharded units keep

    def __bool__(self) -> bool:
        """True if written values of some parameters must be copied to other memory; the same on all ranks."""
        return bool(self._always_unsharded or self._sharded)

    def note(self) -> None:
        """Note the parameters' current versions as those that the engine made."""
        members = [*self._always_unsharded, *(member for unit in self._sharded for member in unit.members)]
        with torch._C.DisableTorchFunctionSubclass():  # sharded parameters answer through Python
            self._versions = {id(member): member.param._version for member in members}

    def note_values(self) -> None:
        """Note the values of exposed parameters as those that the engine made. Their updates are complete."""
        self._exposed = {key: exposed for key, exposed in self._exposed.items() if exposed.is_alive}
        self._update_checksums(exposed.member for exposed in self._exposed.values())

    def forget(self, members: Sequence[Member]) -> None:
        """Ignore writes into these parameters so far."""
        with torch._C.DisableTorchFunctionSubclass():
            self._versions.update({id(m): m.param._version for m in members if id(m) in self._versions})
        self._update_checksums(members)

    def expose(self, unit: Unit, member: Member, values: Tensor) -> None:
        """Watch a parameter that may be written through ``values``, its ``data``, from now on."""
        if id(member) not in self._versions or unit.state is not UnitState.UNSHARDED:
            return
        if id(member) not in self._exposed:
            self._exposed[id(member)] = _Exposed(unit, member, checksum(member.values))
        exposed = self._exposed[id(member)]
        exposed.tensors = [*(tensor for tensor in exposed.tensors if tensor() is not None), weakref.ref(values)]

    def exposed_units(self) -> list[Unit]:
        """Return the units with parameters that may still be written through a tensor that their ``data`` returned."""
        return [exposed.unit for exposed in self._exposed.values() if exposed.is_alive]

    def through_data(self, members: Iterable[Member]) -> list[Member]:
        """Return those of the parameters that were written through their ``data``."""
        exposed = (self._exposed.get(id(member)) for member in members) if self._exposed else ()
        return [each.member for each in exposed if each is not None and each.is_written]

    def _update_checksums(self, members: Iterable[Member]) -> None:
        for member in members if self._exposed else ():
            if (exposed := self._exposed.get(id(member))) is not None and exposed.unit.state is UnitState.UNSHARDED:
                exposed.sum = checksum(member.values)

    def stored(self, members: Sequence[Member]) -> None:
        """Note that the values written into these parameters are stored already."""
        self.forget(members)
        self._add_checksums(members)

    def store_all(self) -> None:
        """Store all written values. Waits for running updates of the written parameters."""
        if written := self._found(self._always_unsharded):
            by_segment = defaultdict[int, list[Member]](list)
            for member in written:
                self._unit_of[id(member)].finish_update()
                by_segment[id(member.segment)].append(member)
            for members in by_segment.values():
                segment = members[0].segment
                self._warn_of_rounding(members[0])
                if segment.master is not None and not segment.master_is_parameter:
                    names = {member.fqn for member in members}  # earlier values are unknown: split masters are rounded
                    segment.set_master_from_full(names)
            self.forget(written)
            self._add_checksums(written)
        for unit in self._sharded:
            if unit.state is UnitState.UNSHARDED and not unit.holds:  # engine.gathered stores values by itself
                self._store_from(unit, is_recomputed=False)

    def take_from(self, unit: Unit) -> None:
        """Store the values written into an unsharded unit, before it is resharded.

        Raises:
            PartitaError: the written values cannot be stored exactly.
        """
        try:
            self._store_from(unit, is_recomputed=torch._C._current_graph_task_id() != -1)
        finally:
            for member in unit.members if self._exposed else ():
                self._exposed.pop(id(member), None)

    def note_kept(self, unit: Unit) -> None:
        """Note the values in the memory that a unit keeps for graphs and views while it is sharded."""
        self._kept[unit] = _checksums(unit)

    def check_kept(self, unit: Unit) -> None:
        """Check that nothing was written into the memory that a sharded unit keeps.

        Raises:
            PartitaError: a parameter was written through a view of it that the user has kept.
        """
        if (before := self._kept.pop(unit, None)) is None:
            return
        changed = accelerator.read(_checksums(unit) != before).tolist()
        if any(changed):
            raise PartitaError(
                f"parameter '{unit.members[changed.index(True)].fqn}' was written through a view that was kept while "
                "the parameter was sharded: the written values are lost; write into the parameter itself, or inside "
                "`with engine.gathered(..., modify=True)`"
            )

    def _store_from(self, unit: Unit, is_recomputed: bool) -> None:
        if not (written := self._found(unit.members)):
            return
        self.forget(written)
        by_segment = defaultdict[int, list[Member]](list)
        for member in written:
            _check_stored(unit, member, is_recomputed)
            by_segment[id(member.segment)].append(member)
        for members in by_segment.values():
            self._warn_of_rounding(members[0])
            store_shards(members[0].segment, {member.fqn for member in members})
        unit.updated = record(unit.storage.device)
        store_secondary(unit)
        self._add_checksums(written)

    def _warn_of_rounding(self, member: Member) -> None:
        """Warn, once, that values written into a 16-bit parameter are rounded, or all its values."""
        segment = member.segment
        if not (self._warns and segment.keeps_digits):
            return
        self._warns = False
        lost, remedy = "the written values are rounded, and changes below that precision are lost", ""
        if segment.planned.always_unsharded and segment.master is not None and segment.master.splits:
            lost = "all values of the parameter are rounded, also those that were not changed"
            remedy = ", or set precision.master: fp32, which rounds the changed values alone"
        warnings.warn(
            f"parameter '{member.fqn}' was written in place in {str(segment.dtype).removeprefix('torch.')}: {lost}; "
            "write it inside `with engine.gathered(..., modify=True)`, which provides fp32 values, or list its module "
            f"in precision.keep_fp32{remedy}",
            stacklevel=2,
        )

    def _found(self, members: Sequence[Member]) -> list[Member]:
        versions = self._versions
        with torch._C.DisableTorchFunctionSubclass():
            found = [m for m in members if m.param._version != versions.get(id(m), m.param._version)]
        if self._exposed:
            known = {id(member) for member in found}
            found += self.through_data(member for member in members if id(member) not in known)
        return found

    # ------------------------------------------------------- comparison of the ranks

    @property
    def sums(self) -> dict[str, int]:
        """A checksum of each parameter that was written since :meth:`agreed`, by name."""
        if not self._sums:
            return {}
        return dict(zip(self._sums, accelerator.read(torch.stack([*self._sums.values()])).tolist(), strict=True))

    @property
    def digest(self) -> int:
        """One checksum of all :attr:`sums`; 0 if nothing was written."""
        return zlib.crc32(repr(sorted(self.sums.items())).encode()) if self._sums else 0

    def agreed(self) -> None:
        """Forget the sums: the ranks have compared them."""
        self._sums = {}

    def _add_checksums(self, members: Iterable[Member]) -> None:
        for member in members:
            self._sums[member.fqn] = checksum(member.values)


def _checksums(unit: Unit) -> Tensor:
    """Return the checksum of each parameter of a unit whose memory has values."""
    return torch.stack([checksum(member.values) for member in unit.members])


def checksum(values: Tensor) -> Tensor:
    """Return the sum of the bits of a flat tensor as integers, multiplied by weights of their positions; a scalar on
    its device. The order of the values changes it.
    """
    bits = values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}.get(values.itemsize, torch.uint8))
    if not bits.numel():
        return bits.new_zeros((), dtype=torch.int64)
    weights = _weights(min(bits.numel(), _SUMMED), bits.device)
    sums = torch.stack([(block * weights[: block.numel()]).sum() for block in bits.split(_SUMMED)])
    return (sums * _weights(sums.numel(), bits.device)).sum()


def _weights(num: int, device: torch.device) -> Tensor:
    """Return different odd numbers, ``[num]``: a product with them keeps each bit of a difference, modulo 2**64."""
    mixed = torch.arange(num, dtype=torch.int64, device=device).mul_(_GOLDEN)
    return mixed.bitwise_xor_(mixed >> 32).bitwise_or_(1)  # without the shift, sums of some permutations are equal


def _has_owner(segment: Segment) -> bool:
    """Return whether an update replaces the parameters by values of one rank or of separate master weights."""
    return not segment.master_is_parameter or segment.planned.num_shards(segment.plan.master) > 1


def _check_stored(unit: Unit, member: Member, is_recomputed: bool) -> None:
    """Check that a value written into an unsharded parameter can be stored exactly.

    Args:
        is_recomputed: backward has recomputed the module and now reshards it, so the write may come after the update.

    Raises:
        PartitaError: it cannot.
    """
    if not (member.segment.planned.unshards_exactly or unit.is_exact):
        raise PartitaError(
            f"parameter '{member.fqn}' was written in forward, where its values are quantized "
            "(communication.parameters): the stored values would lose precision; write it after engine.step() inside "
            "`with engine.gathered(..., modify=True)`, or set communication.parameters: full"
        )
    if is_recomputed and not member.segment.plan.stores_gradients:
        raise PartitaError(
            f"parameter '{member.fqn}' was written while backward recomputed its module, and "
            "precision.gradients: in_backward may have updated it meanwhile: do not recompute that module "
            "(activations.checkpoint), or set precision.gradients: fp32"
        )


def store_shards(segment: Segment, names: AbstractSet[str]) -> None:
    """Store this rank's shard of the named parameters from an unsharded segment."""
    shard = segment.part(segment.full, segment.plan.param_stored)
    lease = segment.stored.lease()
    stored = lease.wait()
    if segment.master is not None and not segment.master_is_parameter:
        before = segment.slice_for_master(stored)
        segment.set_master_from_full(names, before)
    for span in segment.stored_spans:
        if span.fqn in names:
            place = slice(span.offset, span.offset + span.num_elements)
            stored[place] = shard[place]
    lease.end(changed=True)


def store_secondary(unit: Unit) -> None:
    """Store the values of an unsharded unit in its secondary shards, if the next unshard gathers those."""
    if not unit.has_secondary:
        return
    for segment in unit.segments:
        if segment.secondary is not None:
            segment.secondary.store(segment.part(segment.full, segment.plan.param_between))
    unit.secondary_kept = record(unit.storage.device)


class Structure:
    """Checks, before a forward, that the model still consists of the parameters that are trained.

    Wrapping a module (``torch.compile``) is no change; a parameter that is replaced, added or moved is an error.

    Attributes: ``relocated``: ids of parameters that temporarily have other memory, with the values of all tensor ranks
    (in engine.gathered).
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self.model = model
        self.relocated = set[int]()
        self._assigned = set[int]()  # ids of parameters whose data was set to other values
        self._data = dict[int, list[weakref.ref[Tensor]]]()  # by the parameter's id: what its data has returned
        self.modules = list[nn.Module]()  # all modules of the model, in its order, as of the last check
        self._recorded = [(unit, [_with_owners(member) for member in unit.members]) for unit in units]
        self._names = {id(member.param): member.fqn for unit in units for member in unit.members}
        others = [*find_quantized_params(model), *find_all_parameters(model)]
        self._others = {id(info.param) for info in others}
        self._remember()

    def _remember(self) -> None:
        self.modules = list(self.model.modules())
        self._children = [(m._modules, dict(m._modules), m._parameters, len(m._parameters)) for m in self.modules]

    def check(self) -> None:
        """Compare the model with that at ``initialize``.

        Raises:
            PartitaError: a parameter was replaced, added or moved.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for unit, recorded in self._recorded:
                expected = unit.storage._cdata
                for param, fqn, owners in recorded:
                    if param.untyped_storage()._cdata != expected and id(param) not in self.relocated:
                        raise PartitaError(_MOVED.format(fqn))
                    for kind, params, name in owners:
                        if params.get(name) is not param and not _is_functional(params.get(name)):
                            raise PartitaError(_REPLACED.format(fqn, f"{kind}.{name}"))
            if any(now != then or len(params) != num for now, then, params, num in self._children):
                self._check_parameters()
                self._remember()

    def check_values(self) -> None:
        """Compare the values of parameters that were moved to other memory with those that are trained and saved.

        Raises:
            PartitaError: a parameter's values differ from those at the end of the last step.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for unit, _ in self._recorded:
                for member in unit.members:
                    param = member.param
                    if param.untyped_storage()._cdata == unit.storage._cdata or id(param) in self.relocated:
                        continue
                    if unit.state is not UnitState.UNSHARDED or not _same(param, member.within(member.segment.full)):
                        raise PartitaError(_MOVED.format(member.fqn))

    def assign(self, unit: Unit, member: Member, values: Tensor, written: Written) -> bool:
        """Copy ``values`` into an unsharded parameter whose ``data`` is set to them.

        Returns: False if they do not fit the parameter.

        Raises:
            PartitaError: they do not fit, and the parameter is sharded between uses. Or the previous values are still
                referred to: they would change, too.
        """
        param = member.param
        if id(param) in self.relocated or member.sharded_kind is not ShardedParameter:
            return False
        returned = [data for view in self._data.get(id(param), ()) if (data := view()) is not None]
        if any(data is values for data in returned):
            return True  # param.data = param.data.to(device)
        if isinstance(values, ShardedValues):
            values = values.read_with(param)
        like = (values.shape, values.dtype, values.device, values.layout)
        if like != (param.shape, param.dtype, param.device, torch.strided):
            if unit.always_unsharded:
                return False  # an error at the next forward, unless it is undone before
            raise PartitaError(_MOVED.format(member.fqn))
        is_same = values.data_ptr() == param.data_ptr() and values.stride() == param.stride()
        if is_same and id(param) not in self._assigned:
            return True
        if is_same or returned:
            raise PartitaError(_OVERWRITTEN.format(member.fqn))
        self._assigned.add(id(param))
        data = member.within(member.segment.full)
        written.expose(unit, member, data)
        shares_memory = values.untyped_storage()._cdata == unit.storage._cdata
        data.copy_(values.detach().clone() if shares_memory else values.detach())
        return True

    def note_data(self, param: nn.Parameter, data: Tensor) -> None:
        """Note that ``param.data`` has returned ``data``."""
        living = [view for view in self._data.get(id(param), ()) if view() is not None]
        self._data[id(param)] = [*living, weakref.ref(data)]

    def _check_parameters(self) -> None:
        """Check that replaced and added modules have the same parameters."""
        found = {id(param): name for name, param in self.model.named_parameters()}
        for key, name in self._names.items():
            if key not in found:
                raise PartitaError(_REPLACED.format(name, "a module with it"))
        for key, name in found.items():
            if key not in self._names and key not in self._others:
                raise PartitaError(_ADDED.format(name))


_FUNCTIONAL_CALL = torch.nn.utils.stateless._functional_call.__code__


def _is_functional(value: Tensor | None) -> bool:
    """Return whether ``value`` replaces a parameter for the duration of a running ``torch.func.functional_call``."""
    frame: FrameType | None = sys._getframe(1)
    while frame := frame.f_back if frame is not None else None:
        if frame.f_code is _FUNCTIONAL_CALL:
            passed = frame.f_locals["parameters_and_buffers"].values()
            if any(each is value for each in passed):
                return True
    return False


def _same(param: nn.Parameter, values: Tensor) -> bool:
    """Return whether the parameter has these values, on any device and in any dtype that can represent them."""
    return param.shape == values.shape and torch.equal(param.detach().to(values), values)


# A parameter, its name, and for each module with it: the class name, the module's parameters, and the attribute.
_Owned = tuple[nn.Parameter, str, list[tuple[str, dict[str, nn.Parameter | None], str]]]


def _with_owners(member: Member) -> _Owned:
    owners = [(type(owner).__name__, owner._parameters, name) for owner, name in member.info.owners]
    return member.param, member.fqn, owners


_MOVED = (
    "parameter '{}' is no longer a view of its unit's flat buffer: its .data, dtype or device was changed after "
    "initialize (model.double(), model.to(), param.data = ..., flatten_parameters()). Do that before initialize; to "
    "change values, write them in place inside `with engine.gathered(..., modify=True)`"
)
_OVERWRITTEN = (
    "parameter '{}': param.data was set to other values while its previous param.data is kept, maybe as a backup. "
    "partita copies the new values into the parameter's memory, so the kept tensor changes, too: keep "
    "param.data.clone(), and restore it by param.data.copy_(kept)"
)
_REPLACED = (
    "parameter '{}' was replaced ({} is another object now): its new values would never be trained. "
    "Replace, resize and tie parameters before initialize"
)
_ADDED = (
    "parameter '{}' was added to the model after initialize: it would never be trained. "
    "Add parameters before initialize"
)
