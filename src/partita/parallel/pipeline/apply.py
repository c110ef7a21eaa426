"""Put a model under a pipeline: what of it this rank holds, and the order of its work."""

from torch import nn

from partita.comm.mesh import Mesh
from partita.config.resolve import Resolved
from partita.errors import ConfigError
from partita.parallel.pipeline.absent import send_away
from partita.parallel.pipeline.cut import Cut, cut
from partita.parallel.pipeline.schedule import Schedule, Shape, make_schedule
from partita.parallel.pipeline.simulate import simulate
from partita.plan.place import Place
from partita.plan.share import Share
from partita.planner.parameters import find_everywhere


def schedule_of(resolved: Resolved) -> Schedule:
    """The order of work that the config asks for, which was run on paper."""
    parallel = resolved.config.parallel
    shape = Shape(parallel.pipeline, resolved.batch.accumulate, parallel.chunks)
    schedule = make_schedule(parallel.schedule, shape)
    simulate(schedule)
    return schedule


def cut_model(model: nn.Module, resolved: Resolved, mesh: Mesh) -> tuple[Cut | None, dict[int, Share]]:
    """Cut the model into stages and mark the parameters that only other ranks hold; returns with the cut what is held
    by several ranks of the pipeline.

    Raises:
        ConfigError: the model cannot be cut so, or computes its loss from values inside blocks.
    """
    parallel = resolved.config.parallel
    if parallel.pipeline == 1:
        return None, {}
    _check_loss(model)
    names = None if parallel.cut == "auto" else parallel.cut
    found = cut(model, parallel.pipeline * parallel.chunks, names, mesh.device)
    own, shares = mesh.coordinate("pipeline"), dict[int, Share]()
    for holding in find_everywhere(model):
        ranks = tuple(sorted({stage % parallel.pipeline for stage in found.stages[id(holding.param)]}))
        if own not in ranks:
            send_away(holding.param, holding.fqns[0], mesh.device)
        elif len(ranks) > 1:
            shares[id(holding.param)] = Share(Place(tuple(holding.param.shape)), averaged=("tensor",), stages=ranks)
    return found, shares


def _check_loss(model: nn.Module) -> None:
    """Refuse what a model of transformers adds to its loss from inside all blocks."""
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise ConfigError(
            f"parallel.pipeline: {type(model).__name__} adds a loss on the router logits of all blocks "
            "(output_router_logits), and no stage has those of others; set model.config.output_router_logits = False"
        )
