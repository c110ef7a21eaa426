"""Application of the pipeline axis to a model: its stages, this rank's parameters, and the schedule."""

import weakref
from collections.abc import Iterable

from torch import nn

from partita.comm.mesh import Mesh
from partita.config.resolve import Resolved
from partita.errors import ConfigError
from partita.layout.blueprint import compute_encoding
from partita.layout.dtypes import dtype_of
from partita.layout.full_precision import find_full_precision
from partita.layout.off_stage import is_off_stage
from partita.layout.parameters import find_all_parameters
from partita.parallel.applied import AppliedParallelism
from partita.parallel.pipeline.cut import StageCut, cut
from partita.parallel.pipeline.off_stage import discard, mark_off_stage, restore
from partita.parallel.pipeline.schedule import Schedule, Shape, make_schedule
from partita.parallel.tensor.attention import BIAS_BY_HEAD
from partita.table.place import Place
from partita.table.residence import BF16, FP16
from partita.table.share import Share
from partita.transforms.modules import ModuleTransforms, Order


def schedule_of(resolved: Resolved) -> Schedule:
    """Return the schedule that the config asks for."""
    parallel = resolved.config.parallel
    return make_schedule(parallel.schedule, Shape(parallel.pipeline, resolved.batch.accumulate, parallel.num_chunks))


def cut_model(model: nn.Module, resolved: Resolved, mesh: Mesh, parallel: AppliedParallelism) -> None:
    """Cut the model into stages, and mark the parameters that only other ranks store.

    Raises:
        ConfigError: the model cannot be cut as the config says.
    """
    asked = resolved.config.parallel
    names = None if asked.cut == "auto" else asked.cut
    parallel.cut = found = cut(model, asked.pipeline * asked.chunks, names, mesh.device)
    own = mesh.coordinate("pipeline")
    full_precision = find_full_precision(model, resolved)
    off_stage_params = list[nn.Parameter]()
    parallel.transforms.at(Order.PARAMETERS).on_undo(lambda: _restore_all(off_stage_params))
    for entry in find_all_parameters(model):
        ranks = tuple(sorted({stage % asked.pipeline for stage in found.stages[id(entry.param)]}))
        if own not in ranks:
            encoding = compute_encoding(entry, resolved, full_precision)
            is_half = resolved.config.precision.mode == "mixed" and encoding in (BF16, FP16)
            mark_off_stage(entry.param, entry.fqns[0], mesh.device, dtype_of(encoding), is_half=is_half)
            off_stage_params.append(entry.param)
        elif len(ranks) > 1:
            place = Place(tuple(entry.param.shape))
            parallel.shares[id(entry.param)] = Share(place, averaged=("tensor",), stages=ranks)
    weakref.finalize(model, discard, [id(param) for param in off_stage_params])
    for stage in range(len(found.block_bounds) - 1):
        blocks = found.blocks_of(stage)
        block_names = blocks[0] if len(blocks) == 1 else f"{blocks[0]} to {blocks[-1]}"
        parallel.lines.append(f"stage {stage}, on pipeline rank {stage % asked.pipeline}: {block_names}")


def _restore_all(params: Iterable[nn.Parameter]) -> None:
    """Turn parameters that only other stages hold back into ordinary ones, if they still have their values."""
    for param in params:
        if not param.is_meta:
            restore(param)


def check_passed_biases(model: nn.Module, parallel: AppliedParallelism) -> None:
    """Check that no stage receives a position bias that is split by heads: it expects the shapes of unsplit blocks.

    In T5 the first block of a stack computes the bias, and passes it on to the other blocks.

    Raises:
        ConfigError: a stage receives one.
    """
    assert parallel.cut is not None
    for name, module in model.named_modules():
        sharding = parallel.parts.get(id(_head_bias(module)))
        if sharding is None or sharding.places is None:
            continue
        stages = _stages_of_bias(model, parallel.cut, name)
        if len(stages) > 1:
            kind = type(module).__name__
            raise ConfigError(
                f"parallel.pipeline x parallel.tensor: '{name}' ({kind}) computes the position bias of the blocks of "
                f"stages {stages[0]} to {stages[-1]}, and is split by heads: expected a bias of all heads between "
                f"stages; set parallel.tensor_rules: {{{kind}: whole}}, or use parallel.tensor or parallel.pipeline "
                "alone"
            )


def _head_bias(module: nn.Module) -> object:
    return getattr(getattr(module, BIAS_BY_HEAD, None), "weight", None)


def _stages_of_bias(model: nn.Module, found: StageCut, attention: str) -> list[int]:
    """Return the stages of an attention module's block, and of the blocks next to it without a bias of their own."""

    def reads_bias(block: str) -> bool:
        if attention.startswith(f"{block}."):
            return True
        has_own = any(_head_bias(module) is not None for module in model.get_submodule(block).modules())
        return not has_own and attention.startswith(f"{block.rpartition('.')[0]}.")

    num_stages = len(found.block_bounds) - 1
    return [stage for stage in range(num_stages) if any(map(reads_bias, found.blocks_of(stage)))]


def remove_from_other_stages(model: nn.Module, transforms: ModuleTransforms) -> None:
    """Undo the changes of other axes to modules that run only on other stages."""
    modules = [module for module in model.modules() if any(True for _ in module.parameters())]
    transforms.remove(m for m in modules if all(is_off_stage(param) for param in m.parameters()))
