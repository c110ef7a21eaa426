"""Moves the values of the user's model into units, unit by unit, and frees the model's own memory at once.

Every rank ends with its shard of rank 0's values. A model on the ``meta`` device is initialized unit by unit, by its
modules' own ``reset_parameters`` (or, for a Hugging Face model, its ``_init_weights``), so no rank ever holds more than
one unsharded unit.
"""

import hashlib
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Protocol

import torch
from torch import Tensor, nn

from partita.comm.collective_errors import shared_errors
from partita.comm.collectives import Collectives
from partita.comm.group import Group
from partita.comm.several_axes import SeveralAxes
from partita.errors import ConfigError
from partita.layout.dtypes import dtype_of
from partita.layout.off_stage import is_off_stage
from partita.layout.parameters import ParameterInfo, find_all_parameters, find_quantized_params, find_stage_parameters
from partita.memory.tiers import StateMemory
from partita.sharding import quantized
from partita.sharding.initialize import initialize_modules
from partita.sharding.parameter import Member, replace_data
from partita.sharding.segment import Segment
from partita.sharding.unit import Unit, UnitResources
from partita.table.box import Box
from partita.table.mesh_shape import STATE_AXES
from partita.table.planned import PlannedUnit
from partita.table.planned_bucket import PlannedBucket


class InitialValues:
    """Rank 0's initial values, sent to all ranks in one order: stage by stage, unit by unit.

    Attributes:
        needed: True if ranks hold different shards.
        turns: the names of each unit's parameters, with this rank's unit (None for a unit of another pipeline stage).

    Args:
        has: returns True if a source has values for a parameter with these names.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], collectives: Collectives, has: Callable[..., bool]
    ) -> None:
        self._model = model
        self._all_ranks = collectives.all_ranks
        self._has = has
        self._device = collectives.mesh.device
        self.needed = has_distinct_shards(units, collectives)
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._holdings = {info.fqns[0]: info for info in find_all_parameters(model)}
        own = {tuple(member.fqn for member in unit.members): unit for unit in units}
        every = self._all_ranks.exchange_objects(list(own), "partita.initialize") if self.needed else [list(own)]
        names = dict.fromkeys(unit for of_rank in every for unit in of_rank)
        self.turns = [(unit, own.get(unit)) for unit in names]
        self._given = set[str]()

    def _wanted(self, names: Sequence[str]) -> list[ParameterInfo]:
        """Return those of the parameters that have not been sent yet, and for which no source has values."""
        found = [self._holdings[name] for name in names if self.needed and name not in self._given]
        return [info for info in found if not self._has(*info.fqns)]

    def make(self, names: Sequence[str]) -> None:
        """Initialize parameters on the ``meta`` device, unsharded, by their modules."""
        wanted = self._wanted(names)
        given = [info.param for info in wanted if not info.param.is_meta]
        fresh = [info for info in wanted if info.param.is_meta]
        owners = {id(owner): owner for info in fresh for owner, _ in info.owners}
        with _as_plain_parameters(wanted):
            for info in fresh:
                replace_data(info.param, torch.empty_like(info.param.data, device=self._device))
            # Parents last: they may overwrite what their children initialized.
            chosen = [(self._paths[key], owner) for key, owner in reversed(owners.items())]
            initialize_modules(self._model, chosen, given, self._device)

    @torch.no_grad()
    def send(self, names: Sequence[str]) -> None:
        """Broadcast rank 0's values to every rank."""
        with torch._C.DisableTorchFunctionSubclass():
            own = [info.param.data for info in self._wanted(names)]
        sent = [values.to(self._device) for values in own]
        self._all_ranks.broadcast(sent, "start")
        for values, received in zip(own, sent, strict=True):
            if received is not values:
                values.copy_(received)

    def drop(self, names: Sequence[str]) -> None:
        """Free the values of parameters of other stages."""
        for name in names:
            self._given.add(name)
            param = self._holdings[name].param
            if is_off_stage(param):
                with torch._C.DisableTorchFunctionSubclass():
                    replace_data(param, torch.empty_like(param.data, device="meta"))


def has_distinct_shards(units: Sequence[Unit], collectives: Collectives) -> bool:
    """Return whether ranks hold different parameters or slices of parameters. The result is the same on all ranks."""
    is_distinct = any(segment.plan.copies.distinct for unit in units for segment in unit.segments)
    return is_distinct or collectives.all_ranks.size > collectives.group(STATE_AXES).size


def equal_value_ranks(segment: Segment, collectives: Collectives) -> SeveralAxes:
    """Return the ranks that start with the same values of a segment."""
    plan = segment.plan
    return SeveralAxes(collectives, plan.hops(plan.equal_axes, segment.mesh)[::-1])


@contextmanager
def _as_plain_parameters(infos: Sequence[ParameterInfo]) -> Iterator[None]:
    """Context in which parameters of other stages are plain parameters, so that their modules initialize them."""
    others = [(info.param, type(info.param)) for info in infos if is_off_stage(info.param)]
    for param, _ in others:
        param.__class__ = nn.Parameter
    try:
        yield
    finally:
        for param, kind in others:
            param.__class__ = kind


def make_units(
    model: nn.Module, planned: Sequence[PlannedUnit], rank: int, resources: UnitResources, *, by_kernels: bool
) -> list[Unit]:
    """Return the planned units with the model's modules and parameters."""
    modules = dict(model.named_modules())
    infos = {info.fqns[0]: info for info in find_stage_parameters(model)}
    return [
        Unit(unit, modules[unit.name], infos, number, rank, resources, by_kernels=by_kernels)
        for number, unit in enumerate(planned)
    ]


def check_same_model(model: nn.Module, units: Sequence[PlannedUnit], group: Group, *, exact: bool) -> None:
    """Compare the unsharded models of all ranks, before each takes its shard.

    Args:
        exact: the parameters' own dtypes must be equal, too, not only the compute dtypes.

    Raises:
        ConfigError: on every rank: a parameter or buffer is missing on a rank, or has another shape or dtype there.
    """
    computes = {s.fqn: segment.layout for unit in units for segment in unit.segments for s in segment.layout.spans}
    described = []
    for info in find_all_parameters(model):
        name, param = info.fqns[0], info.param
        with torch._C.DisableTorchFunctionSubclass():  # the dtype itself, also of parameters of other stages
            dtype = param.dtype if exact else dtype_of(computes[name].encoding)
        if not exact and computes[name].frozen_master:
            dtype = torch.float32
        shape, trains = tuple(param.shape), param.requires_grad
        described.append(f"parameter '{name}' of shape {shape}, {dtype}, requires_grad {trains}")
    described += [quantized.describe(info) for info in find_quantized_params(model)]
    for name, buffer in model.named_buffers():
        described.append(f"buffer '{name}' of shape {tuple(buffer.shape)}, {buffer.dtype}")
    digest = hashlib.sha256("\n".join(described).encode()).hexdigest()
    if len(set(group.exchange_objects(digest, "partita.initialize"))) == 1:
        return
    every = group.exchange_objects(described, "partita.initialize")
    rank = next(rank for rank, other in enumerate(every) if other != every[0])
    one, other = next(pair for pair in zip_longest(every[0], every[rank], fillvalue="nothing") if pair[0] != pair[1])
    raise ConfigError(
        f"the ranks' models differ: rank 0 has {one} where rank {rank} has {other}; build the same model on every rank"
    )


def check_same_buckets(buckets: Sequence[PlannedBucket], group: Group) -> None:
    """Check that buckets contain the same parameters on all ranks. Updates in backward need it: all ranks decide
    together on the update of each bucket, once it is reduced.

    Raises:
        ConfigError: on every rank: they differ.
    """
    own = [[span.fqn for segment in bucket.segments for span in segment.layout.spans] for bucket in buckets]
    digests = group.exchange_objects(hashlib.sha256(repr(own).encode()).hexdigest(), "partita.initialize")
    if len(set(digests)) > 1:
        raise ConfigError(
            "precision.gradients: in_backward: parallel.tensor splits parameters unevenly, so gradient buckets contain "
            "different parameters on different ranks; set precision.gradients to fp32, or parallel.tensor to a "
            "number that divides heads, widths and vocabulary"
        )


class Source(Protocol):
    """Source of initial values, by name, that replace the model's."""

    title: str

    def find(self, names: Sequence[str]) -> str | None:
        """Return the first of the names that the source has a tensor for."""

    def unused(self, names: Container[str]) -> list[str]:
        """Return the names in the source that are not among these."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Return a tensor, or the ``box`` of it."""


class Assembly:
    """Fills units with the model's values, one after the other.

    A ``source`` provides values of parameters and buffers by any of their names. If a unit is stored sharded and the
    source has all of it, every rank reads its own shard. Otherwise the first rank of each group with equal values reads
    the full tensors and broadcasts them. Parameters that the source lacks keep the model's own values.

    Args:
        undo: gives moved values back to the model; called on all ranks if any of them fails.

    Raises:
        ConfigError: a tensor of the source has another shape, no tensor belongs to the model, or some tensors do not
            belong to the model while some parameters have no tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        collectives: Collectives,
        memory: StateMemory,
        source: Source | None,
        undo: Callable[[], None],
    ) -> None:
        self._model = model
        self._collectives = collectives
        self._memory = memory
        self._source = source
        self._undo = undo
        self._device = collectives.mesh.device
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._initial_values = InitialValues(model, units, collectives, self._has)
        if source is not None:
            with shared_errors(collectives.all_ranks):
                found = self._check_source(source)
            others = collectives.all_ranks.exchange_objects(found, "partita.initialize")
            if any(other != others[0] for other in others):
                rank = next(rank for rank, other in enumerate(others) if other != others[0])
                raise ConfigError(
                    f"{source.title}: rank {rank} finds other tensors than rank 0; every rank reads its own shard, so "
                    "all ranks need the same files"
                )

    def _check_source(self, source: Source) -> str:
        """Check names and shapes, and return a digest of the tensors found. Parameters are not sharded yet."""
        missing, infos = [], find_all_parameters(self._model)
        found = hashlib.sha256()
        for info in infos:
            name, wanted = source.find(info.fqns), tuple(info.param.shape)
            found.update(repr((name, wanted)).encode())
            if name is None:
                missing.append(info.fqns[0])
            elif source.shape(name) != wanted:
                raise ConfigError(
                    f"{source.title}: '{name}' has shape {source.shape(name)}, but the model's parameter has {wanted}"
                )
        if len(missing) == len(infos):
            raise ConfigError(
                f"{source.title}: no tensor is a parameter of {type(self._model).__name__}, whose first parameter is "
                f"'{missing[0]}'"
            )
        known = {fqn for info in [*infos, *find_quantized_params(self._model)] for fqn in info.fqns}
        unused = source.unused(known | {name for name, _ in self._model.named_buffers(remove_duplicate=False)})
        if missing and unused:
            raise ConfigError(
                f"{source.title}: {len(missing)} parameters of the model have no tensor ({_listed(missing)}), and "
                f"{len(unused)} tensors have no parameter ({_listed(unused)}): the names differ; rename the tensors, "
                "remove the unused ones, or load the values into the model before partita.initialize (from_pretrained)"
            )
        if missing and self._collectives.mesh.rank == 0:
            warnings.warn(
                f"{source.title} has no values for {len(missing)} parameters ({_listed(missing)}); they keep the "
                "model's own initial values",
                stacklevel=2,
            )
        return found.hexdigest()

    def turns(self) -> Iterator[Unit]:
        """Yield each unit when it is to be filled. If ranks hold different shards, the unit's parameters have rank 0's
        values by then, except those that the source has.
        """
        first = self._initial_values
        for names, unit in first.turns:
            if first.needed:
                with shared_errors(self._collectives.all_ranks, self._undo):
                    first.make(names)
                first.send(names)
            if unit is not None:
                yield unit
            else:
                self._join_fill()
            first.drop(names)

    def _has(self, *names: str) -> bool:
        return self._source is not None and self._source.find(names) is not None

    def fill(self, unit: Unit) -> None:
        """Store a unit's values, which are then equal on all ranks that have the unit. The unit stays unsharded.

        If master weights have a higher precision than the parameters, the values are first assembled in fp32.

        Raises:
            Exception: on every rank, if any rank fails.
        """
        shards_only = self._reads_shards_only(unit)
        is_wide = not shards_only and any(segment.first_dtype != segment.dtype for segment in unit.segments)
        groups = [equal_value_ranks(segment, self._collectives) for segment in unit.segments]
        with shared_errors(self._collectives.all_ranks, self._undo):
            if is_wide:
                unit.allocate_wide()
            else:
                unit.allocate()
            self._fill_from_model(unit)
            if self._source is not None and not shards_only:
                for segment, group in zip(unit.segments, groups, strict=True):
                    if group.is_first:
                        self._read_full([m for m in unit.members if m.segment is segment], self._source)
        if not shards_only:
            for segment, group in zip(unit.segments, groups, strict=True):
                group.broadcast([segment.full], "start")
        with shared_errors(self._collectives.all_ranks, self._undo):
            first = [segment.full for segment in unit.segments]
            if is_wide:
                unit.allocate()
                for segment, values in zip(unit.segments, first, strict=True):
                    segment.full.copy_(segment.rounded(values))
                for member in unit.members:
                    unit.move(member)
            for segment, values in zip(unit.segments, first, strict=True):
                own = self._read_shard(unit, segment) if shards_only else values
                segment.keep_stored(self._memory, own, is_part=shards_only)

    def _join_fill(self) -> None:
        """Take part in :meth:`fill` on a rank that has nothing of the unit."""
        for _ in range(2):
            with shared_errors(self._collectives.all_ranks, self._undo):
                pass

    def _reads_shards_only(self, unit: Unit) -> bool:
        """Return whether each rank can read just the shard that it stores."""
        has_all = all(self._has(*member.info.fqns) for member in unit.members)
        return has_all and not unit.always_unsharded and all(segment.keeps_one_part for segment in unit.segments)

    def _fill_from_model(self, unit: Unit) -> None:
        """Move the model's own values into a unit's flat buffers."""
        given = [member.param for member in unit.members if not member.param.is_meta]
        fresh = [member for member in unit.members if member.param.is_meta and not self._has(*member.info.fqns)]
        for member in unit.members:
            unit.move_to_buffer(member)
        owners = {id(owner): owner for member in unit.members for owner, _ in member.info.owners}
        needed = {id(owner) for member in fresh for owner, _ in member.info.owners}
        chosen = [(self._paths[key], o) for key, o in owners.items() if key in needed or self._needs_buffers(o)]
        # Parents last: they may overwrite what their children initialized.
        initialize_modules(self._model, chosen[::-1], given, self._device)

    def _read_full(self, members: Sequence[Member], source: Source) -> None:
        for member in members:
            if (name := source.find(member.info.fqns)) is not None:
                with torch.no_grad():
                    for own, there in member.span.place.pieces():
                        box = there if member.span.place.is_part else None
                        member.param[own.slices].copy_(source.read(name, box))

    def _read_shard(self, unit: Unit, segment: Segment) -> Tensor:
        """Read this rank's shard of a segment."""
        assert self._source is not None
        values = torch.zeros(segment.layout.shard_elements, dtype=segment.first_dtype, device="cpu")
        members = {member.fqn: member for member in unit.members}
        for span in segment.layout.part(self._collectives.mesh.index(segment.plan.param_stored.shard_axes)):
            member = members[span.fqn]
            name = self._source.find(member.info.fqns)
            assert name is not None
            flat, elements = values[span.offset :][: span.num_elements], member.elements(span.start, span.stop)
            for box, place in elements.boxes():
                elements.shaped(flat[place], box).copy_(self._source.read(name, box))
        return values

    def fill_others(self) -> None:
        """Move the model's buffers to the device, and broadcast rank 0's values of them and of quantized parameters.

        Raises:
            ConfigError: on every rank: a buffer is still on ``meta``.
        """
        with shared_errors(self._collectives.all_ranks, self._undo):
            for path, module in self._model.named_modules():
                self._fill_buffers_of(module, path)
        group = self._collectives.all_ranks
        group.broadcast(list(self._model.buffers()), "start")
        quantized.broadcast_quantized(find_quantized_params(self._model), group, self._device)

    def _fill_buffers_of(self, module: nn.Module, path: str) -> None:
        if self._needs_buffers(module):
            initialize_modules(self._model, [(path, module)], (), self._device)
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            where = f"{path}.{name}" if path else name
            if self._source is not None and (found := self._source.find([where])) is not None:
                if self._source.shape(found) != tuple(buffer.shape):
                    raise ConfigError(
                        f"{self._source.title}: buffer '{found}' has shape {self._source.shape(found)}, but the "
                        f"model's buffer has {tuple(buffer.shape)}"
                    )
                buffer = self._source.read(found).to(buffer.dtype)
            module._buffers[name] = buffer.to(self._device)

    def _needs_buffers(self, module: nn.Module) -> bool:
        """Return whether a buffer of the module itself has values neither in the model nor in the source."""
        path = self._paths[id(module)]
        return any(
            buffer is not None and buffer.is_meta and not self._has(f"{path}.{name}" if path else name)
            for name, buffer in module._buffers.items()
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:5]) + ", ..." * (len(names) > 5)
