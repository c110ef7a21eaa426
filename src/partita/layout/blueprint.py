"""The blueprint: the planned units of a model.

It is computed from the model (on any device, including ``meta``), the settings, the mesh's shape and the available
memory. Nothing is allocated, changed or sent. The engine is built from it, and the estimates are computed from it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import nn

from partita.config.messages import format_bytes
from partita.config.resolve import Resolved
from partita.config.schema import Config
from partita.errors import ConfigError
from partita.layout.budget import MemoryBudget
from partita.layout.dtypes import encoding_of
from partita.layout.full_precision import FullPrecision, find_full_precision
from partita.layout.parameters import ParameterInfo, check_no_shared_memory, check_supported, find_stage_parameters
from partita.layout.placement import Placement, resolve_tiers
from partita.layout.state_bytes import ADAM_MOMENTS, Moments
from partita.layout.units import UnitSpec, group_units
from partita.layout.working_bytes import working_bytes
from partita.table.mesh_shape import MeshShape
from partita.table.place import Place
from partita.table.planned import PlannedSegment, PlannedUnit, reduction_order
from partita.table.planned_bucket import PlannedBucket, share_buckets
from partita.table.purposes import Needs, united
from partita.table.residence import BF16, ENCODINGS, FP32, INT8, SPLIT, Encoding, Tier
from partita.table.share import NO_COPIES, NO_SHARES, Copies, Share, Shares
from partita.table.span import Entry, SegmentLayout, build_layout
from partita.table.state_plan import Encodings, StatePlan, Tiers, preset, preset_name

ON_DEVICE = Tiers()


@dataclass(frozen=True)
class Blueprint:
    """The planned units of a model under its resolved settings.

    Attributes:
        units: in the model's order, the root unit first.
        moments: the number of values that the optimizer keeps for each element of a parameter.
    """

    resolved: Resolved
    units: tuple[PlannedUnit, ...]
    moments: Moments = ADAM_MOMENTS

    @property
    def config(self) -> Config:
        return self.resolved.config

    @property
    def groups(self) -> Needs:
        """The axes of each process group of the training, with the purposes of its messages."""
        rows = dict.fromkeys(segment.row for unit in self.units for segment in unit.segments)
        return united(row.groups(self.resolved.mesh) for row in [row_of(self.resolved), *rows])

    def working_bytes(self, units: Sequence[PlannedUnit]) -> Counter[Tier]:
        """Return the bytes of working memory by tier (:func:`~partita.layout.working_bytes.working_bytes`)."""
        prefetch, on_host = self.config.zero.prefetch_bytes, self.resolved.on_host
        return working_bytes(units, prefetch, self.moments, on_host=on_host)

    @cached_property
    def buckets(self) -> list[PlannedBucket]:
        """The buckets of gradients, in the order of their reduction."""
        return share_buckets(reduction_order(self.units))


def row_of(
    resolved: Resolved, tiers: Tiers = ON_DEVICE, compute: Encoding | None = None, copies: Copies = NO_COPIES
) -> StatePlan:
    """Return the row of the table for the states of a segment.

    Args:
        tiers: the tiers of the states.
        compute: the compute encoding; None: that of most parameters.
        copies: the axes along which other ranks have copies of the parameters.
    """
    zero, precision = resolved.config.zero, resolved.config.precision
    compute = compute or ENCODINGS[resolved.param_dtype]
    master = FP32 if compute.name in ENCODINGS else compute
    if precision.master == "split" and compute == BF16:
        master = SPLIT
    moments = INT8 if precision.moments == "int8" else FP32
    if precision.gradients == "in_backward":
        tiers = replace(tiers, gradients=None)
    encodings = Encodings(compute, master, ENCODINGS.get(precision.gradients, FP32), moments)
    replicated = zero.replicate == "nodes"
    name = preset_name(
        zero.stage,
        keep_gathered=zero.keep_gathered,
        keep_gradients=zero.keep_gradients,
        hierarchical=zero.hierarchical,
        replicated=replicated,
        changes=resolved.config.communication.parameters != "full",
    )
    row = preset(name, encodings, tiers, resolved.mesh, copies)
    return resolved.extension.row(resolved.config, resolved.mesh, row)


def make_blueprint(
    model: nn.Module,
    resolved: Resolved,
    moments: Moments = ADAM_MOMENTS,
    budget: MemoryBudget | None = None,
    shares: Shares = NO_SHARES,
) -> Blueprint:
    """Group the model's parameters into units, compute the layout of each unit, and choose the tiers of its states.

    Args:
        budget: usable bytes of each memory, for tiers that are ``auto`` in the config; None: unlimited.
        shares: this rank's shares of parameters that are split over ranks or copied on several ranks.

    Raises:
        ConfigError: a kind of parameter is not supported, a pattern of the config matches no module, or the states do
            not fit into memory.
    """
    zero = resolved.config.zero
    specs, entries = unit_entries(model, resolved, shares)
    layouts = [layouts_of(of_unit, resolved, lambda copies: row_of(resolved, copies=copies)) for of_unit in entries]

    def planned(number: int, tiers: Tiers) -> PlannedUnit:
        return plan_unit(specs[number], layouts[number], resolved.mesh, partial(row_of, resolved, tiers))

    if budget is None:
        tiers = [resolve_tiers(zero.offload, ON_DEVICE)] * len(specs)
    else:
        names = [spec.name for spec in specs]
        placement = Placement(names, planned, zero.offload, zero.prefetch_bytes, moments, resolved.on_host)
        tiers = placement.tiers(budget)
    units = tuple(planned(number, chosen) for number, chosen in enumerate(tiers))
    return Blueprint(resolved, units, moments)


def describe_large_unit(units: Sequence[PlannedUnit]) -> str | None:
    """Describe in one line a unit with more than half of a model that is unsharded unit by unit; None without one."""
    total = sum(unit.num_bytes for unit in units)
    largest = max(units, key=lambda unit: unit.num_bytes)
    if largest.always_unsharded or 2 * largest.num_bytes <= total:
        return None
    return (
        f"units: {len(units)}; the largest, {largest.name or 'the root'}, has {largest.num_bytes / total:.0%} of the "
        f"parameters ({format_bytes(largest.num_bytes)}), which are unsharded together; zero.units names smaller ones"
    )


def layouts_of(
    entries: Sequence[Entry], resolved: Resolved, row: Callable[[Copies], StatePlan]
) -> tuple[SegmentLayout, ...]:
    """Return the segment layouts of a unit; ``row(copies)`` returns the row of the table for such parameters."""
    size = resolved.mesh.group_size

    def num_copies(copies: Copies) -> int:
        return size(row(copies).all_replica_axes) * size(copies.axes)

    return build_layout(entries, lambda copies: size(row(copies).gradient_shard_axes), num_copies)


def plan_unit(
    spec: UnitSpec,
    layouts: Sequence[SegmentLayout],
    mesh: MeshShape,
    row: Callable[[Encoding, Copies], StatePlan],
) -> PlannedUnit:
    """Return a unit with these segments; ``row`` returns the row of the table for each.

    Raises:
        ConfigError: only some of its parameters are sharded: they cannot be unsharded in one operation.
    """
    segments = (PlannedSegment(layout, row(layout.encoding, layout.copies), mesh) for layout in layouts)
    unit = PlannedUnit(spec.name, tuple(segments), tuple(spec.enclosing_units))
    odd = next(
        (
            s
            for s in unit.segments
            if (s.always_unsharded, s.stays_unsharded) != (unit.always_unsharded, unit.stays_unsharded)
        ),
        None,
    )
    if odd is not None:
        names = [segment.layout.spans[0].fqn for segment in (unit.segments[0], odd)]
        raise ConfigError(
            f"unit '{unit.name or 'root'}': only one of '{names[0]}' and '{names[1]}' is sharded, since they are on "
            "different ranks: name a module that contains only one of them in zero.units"
        )
    return unit


def unit_entries(
    model: nn.Module, resolved: Resolved, shares: Shares = NO_SHARES
) -> tuple[list[UnitSpec], list[list[Entry]]]:
    """Return the model's units, and the layout's entries for the parameters of each.

    Raises:
        ConfigError: as :func:`make_blueprint`.
    """
    kept = find_full_precision(model, resolved)
    if not (infos := find_stage_parameters(model)):
        raise ConfigError(f"model: all parameters of {type(model).__name__} are quantized and frozen: none can train")
    _check(infos, resolved)
    specs = group_units(model, resolved.config.zero.units)
    return specs, [list(_entries(spec, resolved, kept, shares)) for spec in specs]


def _check(infos: list[ParameterInfo], resolved: Resolved) -> None:
    cast_unasked = resolved.config.precision.compute == "auto"
    for info in infos:
        check_supported(info)
        if cast_unasked and info.param.dtype == torch.float64:
            raise ConfigError(
                f"parameter '{info.fqns[0]}' is in float64, but precision.compute: auto trains in "
                f"{resolved.compute_dtype}: call model.float() first, or request the cast with precision.compute: fp32"
            )
    check_no_shared_memory(infos)


def _entries(spec: UnitSpec, resolved: Resolved, kept: FullPrecision, shares: Shares) -> Iterator[Entry]:
    """Yield the layout's entries for the unit's parameters, with their compute encodings."""
    for info in spec.infos:
        param, encoding = info.param, compute_encoding(info, resolved, kept)
        share = shares.get(id(param)) or Share(Place(tuple(param.shape)), averaged=("tensor",))
        if share.place.shape != param.shape:
            raise ConfigError(
                f"parameter '{info.fqns[0]}' has the shape {tuple(param.shape)}, but its share is for shape "
                f"{share.place.shape}: code that splits a parameter over an axis must keep its full shape"
            )
        copies = share.copies.on(resolved.mesh)
        trains, wider = param.requires_grad, param.is_floating_point() and param.itemsize > encoding.itemsize
        keeps = wider and not trains and resolved.config.precision.frozen == "fp32"
        yield Entry(info.fqns[0], tuple(param.shape), encoding, trains, share.place, copies, keeps)


def compute_encoding(info: ParameterInfo, resolved: Resolved, kept: FullPrecision) -> Encoding:
    """Return the encoding in which a parameter is all-gathered and used in forward; ``kept``: parameters in fp32."""
    if not info.param.is_floating_point():
        return encoding_of(info.param.dtype)
    return FP32 if id(info.param) in kept.params else ENCODINGS[resolved.param_dtype]
