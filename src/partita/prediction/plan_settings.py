"""Plans that the search considers: mesh, ZeRO stage, tiers and precision of the states, and communication settings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from partita.config.schema import Config
from partita.prediction.communication_settings import STAGE_DEFAULT, CommunicationSettings
from partita.table.mesh_shape import MeshShape
from partita.table.state_plan import further_stages

Sections = dict[str, dict[str, Any]]
CHECKPOINTS = ("none", "selective", "units")
# (``activations.checkpoint``, ``activations.offload``): the blocks that backward recomputes, and the tier of their
# inputs. Lists begin with the fastest.
RecomputeSettings = tuple[str, str]
ON_DEVICE: tuple[RecomputeSettings, ...] = tuple((checkpoint, "none") for checkpoint in CHECKPOINTS)
ON_HOST: RecomputeSettings = ("units", "host")
# Settings that every plan determines. Their values in the user's config have no effect.
_PLANNED = {
    "batch": ("micro", "accumulate", "total"),
    "activations": ("checkpoint", "offload"),
    "parallel": ("data", "tensor", "pipeline", "sequence", "cut"),
}


@dataclass(frozen=True)
class StatePrecision:
    """Precision of the states: a name, and the ``keys`` of the config section ``precision``.

    ``one_micro_batch``: the precision is valid only for steps of one micro-batch.
    """

    name: str
    keys: tuple[tuple[str, str], ...] = ()
    one_micro_batch: bool = False

    @property
    def is_exact(self) -> bool:
        """True if states are stored as training without these settings stores them."""
        return not self.keys


def state_precisions(compute: str) -> tuple[StatePrecision, ...]:
    """Return the precisions of the states that this compute dtype allows, from the most exact to the smallest."""
    if compute == "fp32":
        return (StatePrecision("fp32"), StatePrecision("8-bit moments", (("moments", "int8"),)))
    half = StatePrecision(f"{compute} gradients", (("gradients", compute),))
    master = (("master", "split"),) if compute == "bf16" else ()
    lean = StatePrecision("lean", (*master, ("moments", "int8"), ("gradients", compute)))
    if compute == "fp16":
        return (StatePrecision("exact"), half, lean)
    return (
        StatePrecision("exact"),
        half,
        lean,
        StatePrecision("leanest", (*master, ("moments", "int8"), ("gradients", "in_backward")), one_micro_batch=True),
    )


@dataclass(frozen=True)
class StateSettings:
    """Settings of the states: ZeRO stage, tiers of parameters and optimizer states, precision, and communication.

    The tier ``none`` is the device.
    """

    stage: int
    parameters: str = "none"
    optimizer: str = "none"
    precision: StatePrecision = StatePrecision("exact")
    communication: CommunicationSettings = STAGE_DEFAULT

    @property
    def name(self) -> str:
        suffix = f", optimizer on {self.optimizer}" if self.optimizer != "none" else ""
        suffix += f", parameters on {self.parameters}" if self.parameters != "none" else ""
        return f"stage {self.stage}{suffix}, {self.precision.name}" + f", {self.communication.name}" * bool(
            self.communication.name
        )

    def sections(self) -> Sections:
        """Return the config sections that request these settings."""
        offload = {"parameters": self.parameters, "optimizer": self.optimizer}
        offload = {state: tier for state, tier in offload.items() if tier != "none"}
        zero_keys = {
            "stage": self.stage,
            **dict(self.communication.zero_keys),
            **({"offload": offload} if offload else {}),
        }
        more = {"precision": dict(self.precision.keys), "communication": dict(self.communication.communication_keys)}
        return {"zero": zero_keys, **{name: keys for name, keys in more.items() if keys}}


@dataclass(frozen=True)
class PlanSettings:
    """A plan: mesh, settings of the states, micro-batches, and activation checkpointing.

    A step has ``accumulate`` micro-batches of ``micro`` samples. ``inputs``: the tier of the checkpointed inputs;
    ``none`` is the device.
    """

    mesh: MeshShape
    states: StateSettings
    micro: int
    accumulate: int
    checkpoint: str
    inputs: str = "none"

    @property
    def samples(self) -> int:
        """Samples of a step, over all ranks."""
        return self.micro * self.accumulate * self.mesh.data

    @property
    def shares_samples(self) -> bool:
        """True if several ranks compute one sample."""
        return self.mesh.num_ranks > self.mesh.data

    def sections(self) -> Sections:
        """Return the config sections that request this plan."""
        axes = {axis: self.mesh.size(axis) for axis in ("tensor", "pipeline", "sequence")}
        parallel = {axis: size for axis, size in axes.items() if size > 1}
        found = {**({"parallel": parallel} if parallel else {}), **self.states.sections()}
        found["batch"] = {"micro": self.micro, "accumulate": self.accumulate}
        if self.checkpoint != "none":
            offload = {"offload": self.inputs} if self.inputs != "none" else {}
            found["activations"] = {"checkpoint": self.checkpoint, **offload}
        return found


def with_sections(config: Config, sections: Sections) -> dict[str, Any]:
    """Return the config of a plan: its ``sections``, and all other settings of the user's ``config``.

    The tiers of ``zero.offload`` are merged one by one. A tier ``auto`` of ``config`` is left out: plans name tiers.
    """
    given: dict[str, Any] = config.model_dump(mode="json", exclude_unset=True)
    for name, planned in _PLANNED.items():
        given[name] = {key: value for key, value in given.get(name, {}).items() if key not in planned}
    tiers = {key: value for key, value in given.get("zero", {}).pop("offload", {}).items() if value != "auto"}
    found = {name: {**given.pop(name, {}), **values} for name, values in sections.items()}
    if offload := {**tiers, **found["zero"].pop("offload", {})}:
        found["zero"]["offload"] = offload
    return {name: value for name, value in {**found, **given}.items() if value != {}}


def meshes(num_gpus: int, on_node: int, most_stages: int, sequences: Sequence[int] = (1,)) -> Iterator[MeshShape]:
    """Yield the meshes of ``num_gpus`` ranks that are considered.

    Tensor stays within a node, sequence has one of the sizes ``sequences``, pipeline has at most ``most_stages``
    stages, and data has the remaining ranks. Sizes of tensor and pipeline are powers of two.
    """
    for tensor, sequence, pipeline in product(_powers(on_node), sequences, _powers(most_stages)):
        if num_gpus % (tensor * sequence * pipeline) == 0 and on_node % tensor == 0:
            yield MeshShape(pipeline, num_gpus // (tensor * sequence * pipeline), sequence, tensor)


def sequence_sizes(num_gpus: int, on_node: int, positions: int | None) -> list[list[int]]:
    """Return the sizes of the sequence axis, in the order in which they are tried.

    The lists are: unsliced samples, slices within a node, slices across nodes. ``positions`` of a sample bound the
    sizes; None: samples have no positions and are not sliced.
    """
    within = [num for num in _powers(on_node) if 1 < num <= (positions or 1)]
    across = [num for num in _powers(num_gpus) if on_node < num <= (positions or 1)]
    return [sizes for sizes in ([1], within, across) if sizes]


# Stages that shard states. Updates in backward need them.
_SHARDING_STAGES = tuple(stage for stage, _ in further_stages("ddp"))
# Tiers of (parameters, optimizer). A list is tried if no plan of the lists before it fits.
_TIERS = (
    (("none", "none"),),
    (("none", "host"), ("host", "host")),
    (("none", "disk"), ("host", "disk"), ("disk", "disk")),
)


def state_settings_by_tier(compute: str, one_memory: bool) -> list[list[StateSettings]]:
    """Return lists of state settings, those in the fastest memory first.

    ``one_memory``: device and host share their memory, so only the disk tier is used for offloading.
    """
    levels = [tiers for tiers in _TIERS if not (one_memory and "host" in {tier for pair in tiers for tier in pair})]
    if one_memory:
        levels = [_TIERS[0], (("none", "disk"), ("disk", "disk"))]
    return [
        [
            StateSettings(stage, parameters, optimizer, precision)
            for parameters, optimizer in tiers
            for precision in state_precisions(compute)
            for stage in (_SHARDING_STAGES if precision.one_micro_batch else (0, *_SHARDING_STAGES))
        ]
        for tiers in levels
    ]


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]
