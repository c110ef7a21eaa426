"""The runtime of a sharded model: its units, gradient buckets and hooks."""

import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partita.comm.collective_errors import shared_errors
from partita.comm.collectives import Collectives
from partita.errors import PartitaError
from partita.layout.blueprint import Blueprint, row_of
from partita.layout.dtypes import dtype_of
from partita.layout.full_precision import find_full_precision
from partita.layout.state_bytes import bytes_by_tier, model_state_bytes
from partita.memory.accelerator import is_simulated
from partita.memory.allocate import allocate
from partita.memory.buffer_pool import BufferPool, StorageSwap
from partita.memory.ledger import Ledger
from partita.memory.streams import record
from partita.memory.tiers import StateMemory
from partita.sharding.assemble import Assembly, Source, make_units
from partita.sharding.buckets import Bucket
from partita.sharding.buffers import BufferSync
from partita.sharding.finite import Arguments
from partita.sharding.gradient_buffer import BucketLayout
from partita.sharding.hooks import LastHook, UnitEvents, announce
from partita.sharding.interpreter import Interpreter
from partita.sharding.parameter import Member
from partita.sharding.placeholder import ShardedValues, claim, disclaim, leave_share, restore_class
from partita.sharding.precision import ExactLoads, cast_buffers, forward_precision
from partita.sharding.publish import Publisher
from partita.sharding.reducer import GradientReducer
from partita.sharding.segment import Segment
from partita.sharding.structure import Structure, Written, store_secondary, store_shards
from partita.sharding.unit import Unit, UnitResources, UnitState
from partita.sharding.unit_events import Subscriber
from partita.sharding.unshard import Unsharder
from partita.sharding.unshard_order import agree
from partita.table.mesh_shape import MODULE_AXES
from partita.table.planned_bucket import PlannedBucket
from partita.table.residence import ENCODINGS, Tier
from partita.table.slots import bytes_ahead, unit_pool, unshard_scratch_bytes
from partita.transforms.modules import ModuleTransforms

_log = logging.getLogger("partita")

# States of a segment besides moments: parameters, their secondary shard, gradients, master weights.
NUM_STATES = 4


class Runtime:
    """Everything between the user's modules and the optimizer.

    Attributes:
        row: the row of the table for most parameters.
        gradient_group: the ranks whose gradients are summed, which have the same parameters.
        spans_nodes: True if the ranks are on several nodes.

    Args:
        blueprint: the plan of this model.
        transforms: receives the changes to the modules.
        source: values for the parameters that replace the model's own (see :class:`Assembly`).
        by_kernels: True if the optimizer writes the parameters by :mod:`partita.kernels`.
    """

    def __init__(
        self,
        model: nn.Module,
        blueprint: Blueprint,
        collectives: Collectives,
        memory: StateMemory,
        transforms: ModuleTransforms,
        source: Source | None = None,
        *,
        by_kernels: bool = False,
    ) -> None:
        self.model = model
        self.memory = memory
        self.collectives = collectives
        ledger, mesh, config = memory.ledger, collectives.mesh, blueprint.config
        self.row = row_of(blueprint.resolved)
        self.gradient_group = collectives.group(self.row.summed_axes)
        self.spans_nodes = blueprint.resolved.spans_nodes
        kept = find_full_precision(model, blueprint.resolved)
        self._provide_disk(blueprint)
        loan = StorageSwap()
        pool = unit_pool(blueprint.units, config.zero.prefetch_bytes)
        with shared_errors(collectives.all_ranks):
            self._pool = BufferPool("buffer_pool", pool, ledger, mesh.device, backed=loan.swap)
            scratch = self._scratch(blueprint)
        stream, interpreter = mesh.stream("parameters"), Interpreter(collectives)
        resources = UnitResources(interpreter, self._pool, loan, stream, scratch)
        self.units = make_units(model, blueprint.units, mesh.rank, resources, by_kernels=by_kernels)
        sharded = [unit for unit in self.units if not unit.always_unsharded]
        self.publisher = Publisher(interpreter, stream, scratch)
        first = mesh.log.register([unit.title for unit in self.units])
        for unit in self.units:
            unit.number += first
        if mesh.watchdog is None:
            mesh.watchdog = collectives.all_ranks.watchdog()
        unshard_order = agree(self.gradient_group, mesh, lambda: self.reducer.launch_stalled_bucket())
        ahead = bytes_ahead(blueprint.units, config.zero.prefetch_bytes)
        self.written = Written(self.units, mesh.rank)
        has_own_samples = mesh.size("data") > 1 and mesh.size("sequence") == 1 and not is_simulated(mesh.device)
        compute_dtype = dtype_of(ENCODINGS[blueprint.resolved.compute_dtype])
        self.arguments = Arguments(model, compute_dtype, compares=has_own_samples)
        self.unsharder = Unsharder(sharded, unshard_order, ahead, self.written)
        self._wait_in_threads()
        self._hooks: list[Any] = []
        self._accumulate = blueprint.resolved.batch.accumulate
        self._members = dict[int, tuple[Unit, Member]]()  # by the id of the parameter
        self._own_buffers = [(module, dict(module._buffers)) for module in model.modules()]
        try:
            self._assemble(Assembly(model, self.units, collectives, memory, source, self.restore_model))
            if blueprint.resolved.casts_buffers:
                cast_buffers(model, dtype_of(ENCODINGS[blueprint.resolved.compute_dtype]), kept)
            self.reducer = GradientReducer(self._make_buckets(blueprint), collectives, ledger)
            self._own_buffers.clear()
            self.structure = Structure(model, self.units)
            self.written.note()
            self.buffers = BufferSync(
                self.structure, collectives, self.row, config.communication.buffers == "broadcast"
            )
            precision = forward_precision(model, blueprint.resolved, mesh.device, kept, transforms)
            if precision is not None:
                self._hooks.append(precision)
                precision.widen(model, (member for _, member in self.members()))
            self.events = UnitEvents()
            self.events.subscribe(sharded, self.unsharder.subscriber)
            self._hooks.append(self.events)
            self.events.follow(model, self._prepare, self.unsharder.forwards_under_way, self._graph_of_now)
            rounding = [member for _, member in self.members() if member.segment.keeps_digits]
            self._hooks.append(ExactLoads(rounding, self._store_exactly))
            self._members.update({id(member.param): (unit, member) for unit, member in self.members()})
            self._refresh()
        except BaseException:
            self.close()
            raise

    @property
    def device(self) -> torch.device:
        """The device of the parameters in compute."""
        return self.collectives.mesh.device

    @property
    def runs_all(self) -> bool:
        """True if every rank has a shard of every parameter and runs every module."""
        return self.collectives.mesh.shape.group_size(MODULE_AXES) == self.collectives.all_ranks.size

    # ------------------------------------------------------------------ building

    def _scratch(self, blueprint: Blueprint) -> Tensor | None:
        """Allocate scratch memory for unsharding and publishing, if parameters are communicated in another format."""
        if not (num_bytes := unshard_scratch_bytes(blueprint.units)):
            return None
        self.memory.ledger.add("codes", num_bytes)
        return allocate(num_bytes, torch.uint8, self.collectives.mesh.device)

    def _provide_disk(self, blueprint: Blueprint) -> None:
        """Reserve all disk space of the plan, before the model is changed."""
        held = model_state_bytes(blueprint.units, self.collectives.mesh.rank, blueprint.moments)
        num_bytes = bytes_by_tier(held)[Tier.DISK]
        num_states = sum(len(unit.segments) for unit in blueprint.units) * (NUM_STATES + blueprint.moments.most)
        with shared_errors(self.collectives.all_ranks):
            self.memory.provide_disk(num_bytes, num_states if num_bytes else 0)

    def _wait_in_threads(self) -> None:
        """Start threads for streams whose work waits on the host: for the disk, an update or the end of a copy."""
        rows, mesh = [segment.plan for unit in self.units for segment in unit.segments], self.collectives.mesh
        if any(row.param_stored.tier is not Tier.DEVICE or row.master.tier is not Tier.DEVICE for row in rows):
            mesh.stream("parameters").wait_in_thread()
        training = [segment for unit in self.units for segment in unit.segments if segment.trains]
        kept = [state for s in training for state in s.planned.gradients.sync.kept(s.planned.gradients)]
        if any(r.grad_step.tier is not Tier.DEVICE or not r.stores_gradients for r in rows) or any(
            state.residence.tier is not Tier.DEVICE for state in kept
        ):
            mesh.stream("gradients").wait_in_thread()

    def _assemble(self, assembly: Assembly) -> None:
        for unit in assembly.turns():
            assembly.fill(unit)
            for member in unit.members:
                claim(member.param, member.fqn, self)
            if not unit.always_unsharded:
                unit.reshard()
        assembly.fill_others()

    def restore_model(self) -> None:
        """Undo a failed start on all ranks: give moved parameters and buffers back to the model."""
        for hook in self._hooks:
            hook.remove()
        rounded = list[str]()
        for unit in self.units:
            if unit.state is UnitState.SHARDED:
                self.unsharder.hold([unit])
            for member in unit.members:
                disclaim(member.param)
                if not unit.restore_parameter(member):
                    continue
                if member.is_cut:
                    leave_share(member.param)
                if member.rounded:
                    rounded.append(member.fqn)
            if unit.slot is not None:
                unit.reshard()
            for member in unit.members:
                restore_class(member.param, member.kind)
        for module, buffers in self._own_buffers:
            module._buffers.update(buffers)
        if rounded and self.collectives.mesh.rank == 0:
            _log.warning(
                "initialize failed after %d parameters (the first is '%s') had been cast to the compute dtype: they "
                "keep the rounded values; build the model anew to get the exact ones",
                len(rounded),
                rounded[0],
            )

    def _make_buckets(self, blueprint: Blueprint) -> list[Bucket]:
        buckets = make_buckets(blueprint.buckets, self.units, self._accumulate, self.memory.ledger)
        with shared_errors(self.collectives.all_ranks, self.restore_model):
            for bucket in buckets:
                bucket.allocate(self.memory)
        return buckets

    # ------------------------------------------------------------------- forward

    def _prepare(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Prepare a forward of the model: a hook that returns the arguments to use."""
        if torch._C._current_graph_task_id() == -1:
            self.events.check_inputs(args, kwargs)
            self.events.backwards.forget()
            self.unsharder.begin_forward()
        self._refresh()
        self.buffers.before_forward()
        self.arguments.note(args, kwargs)
        return args, kwargs

    def _graph_of_now(self) -> Callable[[], None]:
        """Return the function to call when a backward reaches the output of the forward that has just ended."""
        version, to_runtime = self.unsharder.version, weakref.ref(self)

        def began() -> None:
            if (runtime := to_runtime()) is not None:
                runtime.unsharder.check_version(version, "the model's output")
                runtime.reducer.backward_began()

        return began

    def _refresh(self) -> None:
        """Detect changes of parameters since the last forward: unfrozen, replaced or moved ones."""
        self.structure.check()
        self.train_unfrozen()

    def train_unfrozen(self) -> None:
        """Set up parameters that were unfrozen since the last call. A backward calls this, too: its forward may have
        been that of a submodule.
        """
        slices_sequences = self.collectives.mesh.shape.sequence > 1
        with torch._C.DisableTorchFunctionSubclass():
            for _, member in self.members():
                if member.param.requires_grad and not member.hooked:
                    self._train(member)
                if slices_sequences and member.param._backward_hooks:
                    raise PartitaError(
                        f"parameter '{member.fqn}' has a gradient hook (register_hook), which under parallel.sequence "
                        "would get the gradient of this rank's positions only; remove the hook, and read the gradient "
                        "by engine.gradient(name)"
                    )

    @torch.inference_mode(False)  # states that are allocated in inference mode could not be updated
    def _train(self, member: Member) -> None:
        """Set up a parameter that begins to train: its bucket and its hook."""
        segment = member.segment
        if not segment.trains:
            segment.trains = True
            members = [m for unit in self.units for m in unit.members if m.segment is segment]
            bucket = Bucket(BucketLayout([segment], members), self._accumulate, self.memory.ledger)
            bucket.allocate(self.memory)
            self.reducer.add(bucket)
        self._hooks.append(LastHook(member.param, announce(member, self.reducer.arrived)))
        member.hooked = True

    # ------------------------------------------------------- between and at steps

    def wait_for_updates(self, units: Sequence[Unit]) -> None:
        """Make the forward of these units wait for their overlapped updates. (Gathers do so already.)"""
        waits = Subscriber(opened=lambda call: call.unit.finish_update())
        self.events.subscribe([unit for unit in units if unit.always_unsharded], waits)

    def touched(self, params: Sequence[nn.Parameter], what: str) -> None:
        """See :class:`~partita.sharding.placeholder.Guardian`."""
        sharded = list[nn.Parameter]()
        for param in params:
            unit, _ = self._members[id(param)]
            if unit.always_unsharded:
                unit.finish_update()
            else:
                sharded.append(param)
        if sharded:
            self.unsharder.touched(sharded, what)

    def keeps_unsharded(self, param: nn.Parameter) -> bool:
        """See :class:`~partita.sharding.placeholder.Guardian`."""
        return self._members[id(param)][0].always_unsharded or self.unsharder.keeps_unsharded

    def is_reading(self, param: nn.Parameter) -> bool:
        """See :class:`~partita.sharding.placeholder.Guardian`."""
        return self.unsharder.is_reading(param)

    def exposed(self, param: nn.Parameter, values: Tensor) -> None:
        """See :class:`~partita.sharding.placeholder.Guardian`."""
        if id(param) not in self._members:
            return
        self.structure.note_data(param, values)
        if not isinstance(values, ShardedValues):
            self.written.expose(*self._members[id(param)], values)

    def assign(self, param: nn.Parameter, values: Tensor) -> bool:
        """See :class:`~partita.sharding.placeholder.Guardian`."""
        return id(param) in self._members and self.structure.assign(*self._members[id(param)], values, self.written)

    def store_written(self) -> None:
        """Store the values that the user's code has written into parameters."""
        self.unsharder.end_reads()
        self.written.store_all()

    def _store_exactly(self, loaded: list[tuple[Member, Tensor]]) -> None:
        """Store fp32 values of parameters that have got the rounded values."""
        by_segment = defaultdict[int, list[tuple[Member, Tensor]]](list)
        for member, values in loaded:
            by_segment[id(member.segment)].append((member, values))
        for pairs in by_segment.values():
            unit, segment = self._members[id(pairs[0][0].param)][0], pairs[0][0].segment
            self.touched([member.param for member, _ in pairs], "load_state_dict")
            flat = {member.fqn: member.flat(values.to(segment.full.device, torch.float32)) for member, values in pairs}
            for member, _ in pairs:
                member.values.copy_(segment.rounded(flat[member.fqn]))
            if not unit.always_unsharded:
                store_shards(segment, flat.keys())
                store_secondary(unit)
            segment.set_master(flat)
            unit.updated = record(self.device)
        self.written.stored([member for member, _ in loaded])

    def end_micro_batch(self) -> None:
        """End a micro-batch on all ranks."""
        self.collectives.mesh.log.num_micro_batches += 1
        self.reducer.end_micro_batch()
        self.events.backwards.forget()
        self.events.reset()
        self.unsharder.end_micro_batch()
        self.buffers.end_micro_batch()

    def prepare_for_checkpoint(self) -> None:
        """Reduce all states to what a checkpoint saves, so that this run continues as one that loads it.

        Sums the ranks' error-feedback residuals, and stores parameters exactly. A collective, between two steps.
        """
        self.reducer.sync_states.prepare_for_checkpoint()
        self._deliver([s for unit in self.units for s in unit.trained if s.planned.publish.needs_master])

    def warm_up(self, is_warming_up: bool) -> None:
        """Use the syncs and publish strategies of the warm-up, or those of later steps, from the next step."""
        self.reducer.warm_up(is_warming_up)
        self.publisher.warm_up(is_warming_up)

    def publish(self) -> None:
        """Publish master weights that were written outside a step to the parameters of all ranks. A collective."""
        self._deliver([segment for unit in self.units for segment in unit.trained])

    def _deliver(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            assert segment.master is not None
            lease = segment.master.lease()
            self.publisher.deliver(segment, lease.wait(), segment.plan.master, exact=True)
            lease.end(changed=False)
        if segments:
            self.rewritten()

    def rewritten(self) -> None:
        """Note a change of the parameters by code outside of steps."""
        self.unsharder.order_after_writes()
        self.updated()

    def updated(self) -> None:
        """Note a change of the parameters: earlier graphs are invalid, which autograd detects by version counters."""
        self.unsharder.updated()
        with torch._C.DisableTorchFunctionSubclass():
            torch.autograd.graph.increment_version([m.param for unit in self.units for m in unit.members])
        self.note_values()
        self.written.note()

    def note_values(self) -> None:
        """Note the values of parameters that may be written through their ``data`` as those of the last update."""
        for unit in self.written.exposed_units():
            unit.finish_update()
        self.written.note_values()

    def members(self) -> Iterator[tuple[Unit, Member]]:
        """Yield every parameter of the model with its unit."""
        for unit in self.units:
            for member in unit.members:
                yield unit, member

    def close(self) -> None:
        """Remove the hooks. Parameters stay where they are.

        Unsharded ones are plain parameters again. Those with only this rank's slice are refused by later engines.
        """
        self.unsharder.end_reads()
        for hook in self._hooks:
            hook.remove()
        with torch._C.DisableTorchFunctionSubclass():
            for _, member in self.members():
                disclaim(member.param)
                if member.is_cut:
                    leave_share(member.param)
                member.unmark_placeholder()
        self.memory.close()


def make_buckets(
    planned: Sequence[PlannedBucket], units: Sequence[Unit], accumulate: int, ledger: Ledger
) -> list[Bucket]:
    """Return the planned gradient buckets, in the order in which they are reduced."""
    segments = {id(segment.planned): segment for unit in units for segment in unit.segments}
    members = defaultdict[int, list[Member]](list)
    for member in (member for unit in units for member in unit.members):
        members[id(member.segment)].append(member)
    buckets = []
    for bucket in planned:
        group = [segments[id(segment)] for segment in bucket.segments]
        layout = BucketLayout(group, [member for segment in group for member in members[id(segment)]])
        buckets.append(Bucket(layout, accumulate, ledger))
    return buckets
