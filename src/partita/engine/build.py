"""Building an engine's parts from the config, the model and the user's other arguments."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from partita.activation.apply import Activations, SelectedModules, open_tier
from partita.activation.recompute import Recomputation
from partita.checkpoint.checkpoints import Checkpoints
from partita.comm.collective_errors import check_equal_settings, check_own_devices, shared_errors
from partita.comm.collectives import Collectives
from partita.comm.mesh import Mesh
from partita.comm.several_axes import SeveralAxes
from partita.config.resolve import Resolved
from partita.config.schema import Config
from partita.engine.budget import agreed_budget
from partita.engine.compile import modules_to_compile
from partita.engine.transform import apply_axes, apply_to_forwards, find_attention
from partita.errors import ConfigError
from partita.huggingface.conversion import open_weights
from partita.huggingface.weights import Weights
from partita.inspection.full_tensors import FullTensors
from partita.inspection.gathered import Gathered
from partita.layout.blueprint import Blueprint, make_blueprint
from partita.layout.parameters import check_modules, check_quantized, find_quantized_params
from partita.memory.accelerator import is_simulated
from partita.memory.capacity_check import check_capacity, log_lower_stage
from partita.memory.ledger import Ledger
from partita.memory.out_of_memory import OutOfMemoryReporter
from partita.memory.scratch import open_scratch
from partita.memory.tiers import StateMemory
from partita.optim.build import Factory, build_optimizer, build_schedule, settings_of, wants_kernels
from partita.optim.consensus import LossScale, ReplicaCheck
from partita.optim.extension import CollectiveOptimizer, RunExtension
from partita.optim.fused import KernelRule, rule_for
from partita.optim.in_backward import BackwardUpdater
from partita.optim.owners import groups_of
from partita.optim.states import check_groups
from partita.optim.step import StepUpdater
from partita.optim.traits import (
    check_states_can_be_saved,
    counted_attributes,
    moments_of,
    needs_full_parameters,
)
from partita.optim.updater import Updater
from partita.parallel.applied import AppliedParallelism
from partita.parallel.batch_check import SAME_BATCH_AXES, BatchCheck
from partita.parallel.pipeline.apply import schedule_of
from partita.parallel.pipeline.run import Pipeline
from partita.parallel.pipeline.schedule_cost import simulate
from partita.parallel.random import agreed_seed
from partita.parallel.tensor.parameter import SplitParameters, check_hooks
from partita.sharding import layer_drop
from partita.sharding.assemble import check_same_buckets, check_same_model
from partita.sharding.placeholder import check_not_off_stage, check_unclaimed
from partita.sharding.runtime import Runtime
from partita.table.mesh_shape import AXES, BATCH_AXES, STATE_AXES
from partita.table.purposes import Needs, united
from partita.table.state_plan import StatePlan
from partita.transforms.modules import ModuleTransforms, Order

_log = logging.getLogger("partita")


@dataclass(frozen=True)
class UserArguments:
    """The arguments that the user passes besides model and config (see :func:`partita.initialize`).

    ``parameters``: those of the config's optimizer, or groups of them; None: all.
    """

    optimizer: Optimizer | Factory | None = None
    scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    weights: str | Path | None = None
    parameters: Sequence[Any] | None = None


@dataclass(frozen=True)
class Parts:
    """The parts of an engine. ``weights``: the folder that the values were loaded from."""

    optimizer: Optimizer
    scheduler: LRScheduler
    blueprint: Blueprint
    oom_reporter: OutOfMemoryReporter
    runtime: Runtime
    activations: Activations
    recomputation: Recomputation
    updater: Updater
    whole: FullTensors
    gathered: Gathered
    checkpoints: Checkpoints
    weights: Path | None
    parallel: AppliedParallelism
    batch_check: BatchCheck
    pipeline: Pipeline
    replica_check: ReplicaCheck


def build(model: nn.Module, resolved: Resolved, mesh: Mesh, given: UserArguments) -> Parts:
    """Build an engine's parts and prepare the model. An error on one rank is raised on all, and the model restored."""
    collectives = Collectives(mesh)
    all_ranks = collectives.all_ranks
    check_equal_settings(resolved.shared, all_ranks)
    if not mesh.through_host:
        check_own_devices(mesh.device, all_ranks)
    collectives.open(along_axes(resolved.config))
    seed = agreed_seed(resolved.config.seed, resolved.mesh, all_ranks)
    transforms = ModuleTransforms()
    with transforms.building():
        with shared_errors(all_ranks):
            check_modules(model)
            check_not_off_stage(model)
            parallel = apply_axes(model, resolved, collectives, transforms, seed)
        for notice in parallel.notices if mesh.rank == 0 else ():
            _log.info("%s", notice)
        return _build(model, resolved, collectives, given, parallel)


def _build(
    model: nn.Module, resolved: Resolved, collectives: Collectives, given: UserArguments, parallel: AppliedParallelism
) -> Parts:
    """Build the parts of an engine on a model that the parallel axes have changed."""
    settings, mesh, all_ranks, ledger = resolved.config, collectives.mesh, collectives.all_ranks, Ledger()
    disk = partial(open_scratch, settings.zero.offload, mesh.rank, simulated=is_simulated(mesh.device))
    memory = StateMemory(mesh.device, ledger, disk)
    kernels = wants_kernels(settings, resolved.param_dtype, mesh.device)
    with shared_errors(all_ranks):
        params = list(model.parameters() if given.parameters is None else given.parameters)
        optimizer = build_optimizer(params, settings, given.optimizer, resolved.extension, kernels=kernels, model=model)
        scheduler = build_schedule(optimizer, settings.schedule, given.scheduler)
        check_groups(optimizer, {id(param) for param in model.parameters()})
    moments = moments_of(optimizer, model)
    budget = agreed_budget(settings.zero.offload, collectives)
    with shared_errors(all_ranks):
        check_unclaimed(model)
        for name, param in model.named_parameters():
            if id(param) in parallel.parts:
                check_hooks(param, name)
        check_quantized(find_quantized_params(model), mesh.device)
        if isinstance(resolved.extension, RunExtension):
            parallel.shares.update(resolved.extension.shares(model, mesh.shape, mesh.rank))
        blueprint = make_blueprint(model, resolved, moments, budget, parallel.shares)
        check_capacity(blueprint, model, mesh.device)
        if mesh.rank == 0:
            log_lower_stage(blueprint, model, mesh.device)
        _run_every_layer(model, blueprint, parallel, mesh)
        attention = find_attention(model, settings)
        names = [unit.name for unit in blueprint.units]
        chosen = SelectedModules.of(model, settings, names)
        compiled = modules_to_compile(model, settings.compile, names)
    rows = [unit.row for unit in blueprint.units]
    with shared_errors(all_ranks):
        on_full_parameters = _check_optimizer(optimizer, rows, settings, mesh)
    _agree(model, blueprint, optimizer, settings, collectives, on_full_parameters=on_full_parameters)
    counted = counted_attributes(
        optimizer, on_clone=on_full_parameters or not all(row.updates_on_device for row in rows)
    )
    oom_reporter = OutOfMemoryReporter(blueprint, ledger, mesh.device, mesh.rank)
    with shared_errors(all_ranks):
        source = open_weights(Weights(given.weights), model) if given.weights is not None else None
    try:
        with oom_reporter.report_out_of_memory("initialize"):
            by_kernels = isinstance(rule_for(optimizer), KernelRule)
            runtime = Runtime(model, blueprint, collectives, memory, parallel.transforms, source, by_kernels=by_kernels)
        failed = ExitStack()
        failed.callback(runtime.restore_model)
        with shared_errors(all_ranks, failed.close):
            split = SplitParameters((member for _, member in runtime.members()), parallel.parts, mesh)
            failed.callback(split.remove)
            parallel.transforms.at(Order.PARAMETERS).on_undo(split.close)
            updater = _make_updater(runtime, optimizer, resolved, counted, on_full_parameters=on_full_parameters)
            failed.callback(updater.close)
            whole = FullTensors(runtime, updater)
            gathered = Gathered(runtime, updater, whole, parallel.transforms)
            checkpoints = Checkpoints(model, runtime, updater, scheduler, settings, parallel.streams)
            open_tier(settings, memory)
            schedule = schedule_of(resolved)
            max_in_flight = simulate(schedule).max_kept_forwards[mesh.coordinate("pipeline")]
            activations = Activations(settings, memory, collectives, max_in_flight)
            transformed = apply_to_forwards(
                model,
                settings,
                parallel,
                attention,
                chosen,
                splits_weights=schedule.splits_weights,
                activations=activations,
            )
            section, changes = settings.compile, parallel.transforms.at(Order.COMPILE)
            for module in compiled.values():
                changes.compile(module, backend=section.backend, mode=section.mode, dynamic=section.dynamic)
            early_output = runtime.events.early_output
            pipeline = Pipeline(model, parallel, schedule, collectives, early_output, transformed.weights)
            replica_check = ReplicaCheck(runtime, updater.wait_for_updates, resolved.extension.check_every(settings))
    except BaseException:
        memory.close()
        raise
    weights = source.folder if source is not None else None
    batch_check = BatchCheck(SeveralAxes.of(collectives, SAME_BATCH_AXES), mesh.coordinate("data"))
    if not pipeline.is_cut:  # the stages of a pipeline run their forwards at different times
        runtime.events.check_inputs = partial(_check_batch, batch_check, gathered)
    return Parts(
        optimizer,
        scheduler,
        blueprint,
        oom_reporter,
        runtime,
        activations,
        transformed.recomputation,
        updater,
        whole,
        gathered,
        checkpoints,
        weights,
        parallel,
        batch_check,
        pipeline,
        replica_check,
    )


def _check_batch(batch_check: BatchCheck, gathered: Gathered, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check that ranks that compute one model together have the same inputs."""
    if not gathered.num_open:  # inside, every rank has the full model
        batch_check.check(args, kwargs)


def _run_every_layer(model: nn.Module, blueprint: Blueprint, parallel: AppliedParallelism, mesh: Mesh) -> None:
    """Switch LayerDrop off if ranks share sharded parameters, or each runs a part of the layers or positions."""
    if mesh.num_ranks > 1 and not all(unit.always_unsharded for unit in blueprint.units):
        reason = "sharded parameters need every rank to run them"
    elif mesh.size("sequence") > 1:
        reason = "parallel.sequence splits the sequence at the first layer and gathers it after the last"
    elif mesh.size("pipeline") > 1:
        reason = "parallel.pipeline passes values from each layer to the next"
    else:
        return
    notice = layer_drop.switch_off(model, parallel.transforms.at(Order.ATTENTION), reason)
    if notice and mesh.rank == 0:
        _log.info("%s", notice)


def along_axes(settings: Config) -> Needs:
    """Return the purposes of the messages between ranks along single axes."""
    along: dict[tuple[str, ...], frozenset[str]] = {
        (axis,): frozenset({"control"} if (axis,) == BATCH_AXES else {"activations", "control"}) for axis in AXES
    }
    along["tensor",] |= {"gradients"}  # of parameters that have copies
    if settings.activations.partition:
        along["tensor",] |= {"parameters"}  # for parts of activations, in turn with these
    return along


def _check_optimizer(optimizer: Optimizer, rows: Sequence[StatePlan], settings: Config, mesh: Mesh) -> bool:
    """Return whether the optimizer needs full parameters, and the plan gives it slices.

    Raises:
        ConfigError: it needs all parameters at a time, and the plan gives it less; names its class.
    """
    check_states_can_be_saved(optimizer)
    is_cut = any(mesh.shape.group_size(row.master.shard_axes) > 1 for row in rows) or mesh.shape.tensor > 1
    in_parts = mesh.shape.pipeline > 1 or settings.precision.gradients == "in_backward"
    if is_cut or in_parts or not all(row.updates_on_device for row in rows):
        return needs_full_parameters(optimizer, cuts=is_cut)
    return False


def _agree(
    model: nn.Module,
    blueprint: Blueprint,
    optimizer: Optimizer,
    settings: Config,
    collectives: Collectives,
    *,
    on_full_parameters: bool,
) -> None:
    """Check that all ranks have the same plan, and connect the groups that any of them needs."""
    all_ranks = collectives.all_ranks
    own = [blueprint.groups]
    if isinstance(optimizer, CollectiveOptimizer):
        own.append(optimizer.groups(blueprint))
        for notice in optimizer.notices if all_ranks.index == 0 else ():
            _log.info("%s", notice)
    if on_full_parameters:
        own.append(groups_of(blueprint))
        if all_ranks.index == 0:
            _log.info("optimizer %s needs full parameters: one rank updates each of them", type(optimizer).__name__)
    every = all_ranks.exchange_objects(united(own), "partita.initialize")
    collectives.open(united(every))  # also those of other stages alone
    check_same_model(model, blueprint.units, all_ranks, exact=collectives.group(STATE_AXES).size < all_ranks.size)
    if settings.precision.gradients == "in_backward":
        check_same_buckets(blueprint.buckets, all_ranks)
    check_equal_settings(settings_of(optimizer), all_ranks)


def _make_updater(
    runtime: Runtime, optimizer: Optimizer, resolved: Resolved, counted: Sequence[str], *, on_full_parameters: bool
) -> Updater:
    settings = resolved.config
    scale = LossScale(settings.precision, resolved.compute_dtype == "fp16")
    kind = BackwardUpdater if settings.precision.gradients == "in_backward" else StepUpdater
    extension = resolved.extension
    warmup_steps = extension.warmup_steps(settings)
    clip_norm = settings.clip_grad_norm
    updater = kind(runtime, optimizer, scale, clip_norm, counted, warmup_steps, on_full_parameters=on_full_parameters)
    if isinstance(extension, RunExtension):
        listeners = extension.listeners(runtime, optimizer, updater.views, settings)
        if on_full_parameters and listeners:
            raise ConfigError(
                f"{listeners[0].setting}: not with optimizer {type(optimizer).__name__}, which needs full parameters; "
                "use an elementwise optimizer such as AdamW"
            )
        updater.set_listeners(listeners)
    return updater
