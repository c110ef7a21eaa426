"""From the user's model to units: values are taken out of it unit by unit, and its memory is given back at once.

Every rank ends with rank 0's values. A model on the ``meta`` device is initialized unit by unit, by its modules' own
``reset_parameters`` (or, for a Hugging Face model, its ``_init_weights``), so no rank ever holds more than a unit of it
whole.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from partita.comm.collectives import Collectives
from partita.config.schema import Config
from partita.errors import ConfigError
from partita.memory.ledger import Ledger
from partita.plan.mesh_shape import MeshShape
from partita.plan.residence import ENCODINGS, Encoding
from partita.plan.span import Entry, lay_out
from partita.plan.state_plan import Encodings, StatePlan, preset, preset_name
from partita.sharding.casts import keep_fp32_modules
from partita.sharding.dtypes import encoding_of
from partita.sharding.group_units import Holding, group_units
from partita.sharding.unit import Segment, Unit, check_supported

DATA = ("data",)


@dataclass(frozen=True)
class Blueprint:
    """What decides a unit's layout: the config, the compute encoding after ``auto``, the mesh and this rank."""

    config: Config
    compute: Encoding
    mesh: MeshShape
    rank: int

    @property
    def preset(self) -> str:
        zero = self.config.zero
        return preset_name(zero.stage, keep_gathered=zero.keep_gathered, hierarchical=zero.hierarchical)

    @property
    def row(self) -> StatePlan:
        """The row of the table that parameters in the compute encoding have."""
        return preset(self.preset, self.encodings(self.compute))

    def encodings(self, compute: Encoding) -> Encodings:
        precision = self.config.precision
        master = compute if compute.name not in ENCODINGS else ENCODINGS[precision.master]
        return Encodings(compute, master, ENCODINGS[precision.gradients], ENCODINGS[precision.moments])


def plan_units(model: nn.Module, blueprint: Blueprint) -> list[Unit]:
    """Group the model's parameters and lay every unit out; nothing is allocated or changed yet.

    Raises:
        ConfigError: a parameter's kind is not supported, or a pattern of the config matches nothing.
    """
    kept = keep_fp32_modules(model, blueprint.config.precision.keep_fp32)
    units = list[Unit]()
    for spec in group_units(model, blueprint.config.zero.units):
        for holding in spec.holdings:
            check_supported(holding)
        entries = [
            Entry(h.fqns[0], tuple(h.param.shape), _encoding(h, blueprint.compute, kept), h.param.requires_grad)
            for h in spec.holdings
        ]
        layout = lay_out(spec.name, entries, blueprint.mesh.data)
        segments = [
            Segment(s, preset(blueprint.preset, blueprint.encodings(s.encoding)), blueprint.mesh, blueprint.rank)
            for s in layout.segments
        ]
        units.append(Unit(spec, layout, segments, len(units)))
    return units


def _encoding(holding: Holding, compute: Encoding, kept: set[int]) -> Encoding:
    """A parameter's compute encoding. Batch norms always compute in fp32, as their running statistics do."""
    if not holding.param.is_floating_point():
        return encoding_of(holding.param.dtype)
    stays = any(id(owner) in kept or isinstance(owner, _BatchNorm) for owner, _ in holding.owners)
    return ENCODINGS["fp32"] if stays else compute


Source = Callable[[list[str]], Tensor | None]


class Assembly:
    """Fills units with the model's values, one after the other.

    ``source`` brings the values of a parameter or buffer by any of its names, whole, and is asked on rank 0 only;
    without one the model's own values are taken.
    """

    def __init__(self, model: nn.Module, collectives: Collectives, ledger: Ledger, source: Source | None) -> None:
        self._model, self._collectives, self._ledger, self._source = model, collectives, ledger, source
        self._device = collectives.mesh.device

    def fill(self, unit: Unit) -> None:
        """Move a unit's values into its buffers, the same on every rank, and keep what rests; the unit is left
        whole.
        """
        fresh = [member for member in unit.members if member.param.is_meta]
        for member in unit.members:
            unit.adopt(member)
        if self._source is not None:
            self._load(unit, self._source)
        elif fresh:
            owners = {id(owner): owner for member in fresh for owner, _ in member.holding.owners}
            for owner in owners.values():
                initialize_module(self._model, owner, fresh[0].fqn)
        self._collectives.broadcast([segment.full for segment in unit.segments], DATA, "start")
        for segment in unit.segments:
            segment.cut_rest(self._ledger)

    def _load(self, unit: Unit, source: Source) -> None:
        if self._collectives.mesh.rank:
            return
        for member in unit.members:
            values = source(member.holding.fqns)
            if values is not None:
                with torch.no_grad():
                    member.param.copy_(values)

    def fill_buffers(self) -> None:
        """Move the model's buffers to the device; every rank gets rank 0's values.

        Raises:
            ConfigError: a buffer is still on ``meta``.
        """
        for module_name, module in self._model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                where = f"{module_name}.{name}" if module_name else name
                if self._source is not None and (values := self._source([where])) is not None:
                    module._buffers[name] = buffer = values.to(buffer.dtype)
                if buffer.is_meta:
                    raise ConfigError(
                        f"buffer '{where}' is on the meta device, and no reset_parameters of "
                        f"{type(module).__name__} fills it; fill it there, or build the model on a real device"
                    )
                if buffer.device != self._device:
                    module._buffers[name] = buffer.to(self._device)
        self._collectives.broadcast([b.contiguous() for b in self._model.buffers()], DATA, "start")


def initialize_module(model: nn.Module, module: nn.Module, fqn: str) -> None:
    """Give the parameters of one module their initial values.

    Raises:
        ConfigError: the module has no way to initialize itself.
    """
    reset: Callable[[], Any] | None = getattr(module, "reset_parameters", None)
    by_model: Callable[[nn.Module], Any] | None = getattr(model, "_init_weights", None)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
    with torch.no_grad():
        if by_model is not None:
            by_model(module)
        elif reset is not None:
            reset()
        else:
            raise ConfigError(
                f"parameter '{fqn}' is on the meta device, and {type(module).__name__} has no reset_parameters() to "
                "initialize it: add that method, or build the model on a real device"
            )
