"""The table: one row of residences defines how a unit's states are stored through a training step.

Rows are the presets users name by a ZeRO stage (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", 2020, section 5; the hierarchical row: Wang et al., "ZeRO++", 2023, section 3.2, hpZ; the
replicated row: Zhao et al., "PyTorch FSDP", 2023, section 3.2.2, hybrid sharding). The planner, the simulator and the
runtime read this table; nothing else decides where a state is stored.
"""

from dataclasses import dataclass, replace
from itertools import chain, combinations, permutations

from partita.table.mesh_shape import BATCH_AXES, STATE_AXES, MeshShape, expand
from partita.table.purposes import Needs, purposes_of_all_ranks, united
from partita.table.residence import FP32, Encoding, Residence, Tier
from partita.table.share import NO_COPIES, Copies
from partita.table.steps import Communicating, steps
from partita.table.strategies import UNCOMPRESSED, Strategies

STATES = STATE_AXES
# The axes of STATES within one node.
LOCAL = ("local", *(axis for axis in STATE_AXES if axis != "data"))
# All axes of STATES, those within a node outermost: each rank's shard is a slice of its shard within the node.
WITHIN_LOCAL = (*LOCAL, "node")


@dataclass(frozen=True)
class Encodings:
    """The encodings of parameters in compute, master weights, gradients (stored and communicated) and moments."""

    compute: Encoding = FP32
    master: Encoding = FP32
    gradients: Encoding = FP32
    moments: Encoding = FP32


@dataclass(frozen=True)
class Tiers:
    """The memory in which each state is stored.

    ``optimizer`` is where master weights and moments are stored, and where the update is computed. ``gradients`` is
    None if they are not stored: the update runs in backward, as soon as they are reduced.

    Sources: Ren et al., "ZeRO-Offload", and Rajbhandari et al., "ZeRO-Infinity", 2021.
    """

    parameters: Tier = Tier.DEVICE
    gradients: Tier | None = Tier.DEVICE
    optimizer: Tier = Tier.DEVICE


@dataclass(frozen=True)
class StatePlan:
    """One row of the table: the residence of each state at each phase of a step.

    Attributes:
        param_stored: parameters between steps.
        param_compute: parameters inside a unit's forward or backward.
        param_between: parameters from the end of the unit's forward to the start of its backward.
        grad_arrival: gradients as autograd leaves them.
        grad_between: gradients between micro-batches.
        grad_step: gradients when the optimizer runs.
        master: master weights, at all times.
        moments: moments, at all times.
        stores_gradients: False if the optimizer runs in backward; gradients are then in ``grad_step`` only until it has
            run.
        copies: the axes over which the gradients in ``grad_step`` still have to be summed, once, before they are
            measured.
        strategies: how the states are communicated.
        separate_axes: the axes along which replicas train separately, and average their weights every few steps; all
            other axes of the row are then within one replica.
    """

    name: str
    param_stored: Residence
    param_compute: Residence
    param_between: Residence
    grad_arrival: Residence
    grad_between: Residence
    grad_step: Residence
    master: Residence
    moments: Residence
    stores_gradients: bool = True
    copies: Copies = NO_COPIES
    strategies: Strategies = UNCOMPRESSED
    separate_axes: tuple[str, ...] = ()

    @property
    def updates_on_device(self) -> bool:
        """True if all states that the optimizer needs are on the device at the step."""
        return self.stores_gradients and all(r.tier is Tier.DEVICE for r in (self.grad_step, self.master, self.moments))

    @property
    def uses_disk(self) -> bool:
        """True if parameters, master weights or moments are stored on disk."""
        return Tier.DISK in (self.param_stored.tier, self.master.tier, self.moments.tier)

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """The axes over which gradients are summed."""
        return self.grad_arrival.partial_axes

    @property
    def mean_axes(self) -> tuple[str, ...]:
        """The axes over which gradients are averaged: those of the sum, and those along which parameters differ."""
        if not self.copies.distinct:
            return self.summed_axes
        return tuple(axis for axis in expand(STATE_AXES) if axis in (*self.summed_axes, *self.copies.distinct))

    @property
    def equal_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have the same initial values of the parameters."""
        return tuple(axis for axis in expand(STATE_AXES) if axis not in self.copies.distinct)

    @property
    def gradient_shard_axes(self) -> tuple[str, ...]:
        """The axes over which segments are sharded: each rank of such a group sums the gradients of one shard, and
        measures and saves them. Ranks of the sum in different groups have the same shard.
        """
        return self.grad_step.shard_axes or self.summed_axes

    @property
    def gradient_replica_axes(self) -> tuple[str, ...]:
        """The axes along which ranks sum the gradients of the same shard."""
        return tuple(axis for axis in expand(self.summed_axes) if axis not in expand(self.gradient_shard_axes))

    @property
    def parameter_replica_axes(self) -> tuple[str, ...]:
        """The axes along which ranks store the same shard of the parameters."""
        return tuple(axis for axis in expand(self.summed_axes) if axis not in expand(self.param_stored.shard_axes))

    @property
    def master_replica_axes(self) -> tuple[str, ...]:
        """The axes along which ranks store the same shard of the master weights."""
        return tuple(axis for axis in expand(self.summed_axes) if axis not in expand(self.master.shard_axes))

    @property
    def all_replica_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have the same shard, with those of replicas that train separately (whose weights
        are equal after they are averaged). Inspection and checkpoints use the first rank along them.
        """
        return (*self.separate_axes, *self.gradient_replica_axes)

    def hops(self, axes: tuple[str, ...], mesh: MeshShape) -> tuple[tuple[str, ...], ...]:
        """Return the groups to use, one after the other, for rare messages to all ranks along ``axes``.

        This is one group if the row communicates over it in every step. Otherwise it is the group within a node, then
        that over the nodes, so that no group of both is needed.
        """
        moved = {mesh.named(each) for each in chain(*self._moved(mesh))}
        parts = mesh.active(axes)
        if "node" not in parts or len(parts) == 1 or mesh.named(axes) in moved or self.strategies != UNCOMPRESSED:
            return (axes,)
        return tuple(axis for axis in parts if axis != "node"), ("node",)

    def _moved(self, mesh: MeshShape) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
        """Return the axes of all-gathers of weights, and those of the reductions and all-gathers of gradients."""
        weights = permutations((self.param_stored, self.param_compute, self.param_between, self.master), 2)
        gradients = combinations((self.grad_arrival, self.grad_between, self.grad_step), 2)
        gathered, reduced = (
            [op.axes for src, dst in pairs for op in steps(src, dst, mesh) if isinstance(op, Communicating)]
            for pairs in (weights, gradients)
        )
        reduced += [axes for combined in tuple(reduced) for axes in self.strategies.groups_of_sum(combined, mesh)]
        return gathered, reduced

    def groups(self, mesh: MeshShape) -> dict[tuple[str, ...], frozenset[str]]:
        """Return the axes of each group that training communicates over, and its purposes.

        These are the groups of moves between residences, of copies, of sums, of the batch, of the modules, and of all
        ranks.
        """
        gathered, reduced = self._moved(mesh)
        states, control = frozenset({"parameters", "gradients"}), frozenset({"control"})
        needs: list[Needs] = [
            {mesh.all_axes: control | purposes_of_all_ranks(mesh), mesh.named(BATCH_AXES): control},
            {mesh.named(self.summed_axes): control, mesh.named(self.copies.axes): control | {"gradients"}},
            {mesh.named(STATE_AXES): control, mesh.named(self.separate_axes): control | states},
            dict.fromkeys(gathered, frozenset({"parameters"})),
            dict.fromkeys(reduced, frozenset({"gradients"})),
        ]
        rare = (*self.hops(self.equal_axes, mesh), *self.hops(self.summed_axes, mesh))
        needs += [{mesh.named(axes): states} for axes in rare]
        return {axes: purposes for axes, purposes in united(needs).items() if axes}


@dataclass(frozen=True)
class _Row:
    """A preset: the shard axes of each column. If ``partial``, gradients are summed at the step, not before."""

    stored: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    grad_between: tuple[str, ...] = ()
    partial: bool = False
    grad_step: tuple[str, ...] = ()
    states: tuple[str, ...] = ()


ONE_RANK = MeshShape()
PRESETS = {
    "ddp": _Row(partial=True),
    "zero1": _Row(partial=True, grad_step=STATES, states=STATES),
    "zero2": _Row(grad_between=STATES, grad_step=STATES, states=STATES),
    "zero3": _Row(stored=STATES, between=STATES, grad_between=STATES, grad_step=STATES, states=STATES),
    "zero3-kept": _Row(stored=STATES, grad_between=STATES, grad_step=STATES, states=STATES),
    "zero3-once": _Row(stored=STATES, partial=True, grad_step=STATES, states=STATES),
    "hierarchical": _Row(stored=STATES, between=LOCAL, grad_between=STATES, grad_step=STATES, states=STATES),
    "hierarchical-changes": _Row(
        stored=LOCAL, between=LOCAL, grad_between=WITHIN_LOCAL, grad_step=WITHIN_LOCAL, states=WITHIN_LOCAL
    ),
    "hsdp": _Row(stored=LOCAL, between=LOCAL, grad_between=LOCAL, grad_step=LOCAL, states=LOCAL),
}
_STAGES = ("ddp", "zero1", "zero2", "zero3")


def preset(
    name: str,
    encodings: Encodings = Encodings(),
    tiers: Tiers = Tiers(),
    mesh: MeshShape = ONE_RANK,
    copies: Copies = NO_COPIES,
) -> StatePlan:
    """Return the row called ``name`` (a key of :data:`PRESETS`) with the given encodings and tiers.

    Partial sums over the ranks of ``mesh`` stay on the device, where they are reduced. Parameters that are stored
    unsharded in another tier go back there between forward and backward, unless the row keeps them.
    """
    row, e = PRESETS[name], encodings
    kept, stores_gradients = bool(row.stored) and not row.between, tiers.gradients is not None
    if tiers.gradients is None:
        row = replace(row, grad_between=row.grad_step, partial=False)
    passing = Tier.HOST if tiers.optimizer is Tier.DISK else tiers.optimizer
    gradients = Tier.DEVICE if row.partial and mesh.group_size(STATES) > 1 else tiers.gradients or passing
    copies = copies.on(mesh)

    def shared(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in expand(axes) if axis not in copies.distinct) if copies.distinct else axes

    return StatePlan(
        name=name,
        param_stored=Residence(shared(row.stored), (), e.compute, tiers.parameters),
        param_compute=Residence((), (), e.compute),
        param_between=Residence(shared(row.between), (), e.compute, Tier.DEVICE if kept else tiers.parameters),
        grad_arrival=Residence((), shared(STATES), e.compute),
        grad_between=Residence(shared(row.grad_between), shared(STATES) if row.partial else (), e.gradients, gradients),
        grad_step=Residence(shared(row.grad_step), (), e.gradients, gradients),
        master=Residence(shared(row.states), (), e.master, tiers.optimizer),
        moments=Residence(shared(row.states), (), e.moments, tiers.optimizer),
        stores_gradients=stores_gradients,
        copies=copies,
    )


def preset_name(
    stage: int,
    *,
    keep_gathered: bool = False,
    keep_gradients: bool = False,
    hierarchical: bool = False,
    replicated: bool = False,
    changes: bool = False,
) -> str:
    """Return the preset of a ZeRO stage and its variants. ``replicated``: every node has all states; ``changes``:
    parameters are communicated between nodes as encoded deltas.
    """
    chosen = {
        "zero3-once": keep_gradients,
        "zero3-kept": keep_gathered,
        "hierarchical-changes": hierarchical and changes,
        "hierarchical": hierarchical,
        "hsdp": replicated,
    }
    return next((name for name, is_chosen in chosen.items() if is_chosen), _STAGES[stage])


def further_stages(name: str) -> list[tuple[int, str]]:
    """Return (stage, preset) of the stages that shard more than the preset called ``name``."""
    last = len(_STAGES) - 1
    own = _STAGES.index(name) if name in _STAGES else last
    return [(stage, _STAGES[stage]) for stage in range(own + 1, last + 1)]


def lower_stages(name: str) -> list[tuple[int, str]]:
    """Return (stage, preset) of the stages that shard less than the preset called ``name``, if that is a stage."""
    own = _STAGES.index(name) if name in _STAGES else 0
    return list(enumerate(_STAGES))[:own]


def neighbouring_stages(stage: int) -> list[int]:
    """Return the stages that shard one state less and one more."""
    return [other for other in (stage - 1, stage + 1) if other in range(len(_STAGES))]
