"""Variants of the plans that a search has found, with other communication settings."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import nsmallest

from partita.config.resolve import resolve
from partita.errors import ConfigError
from partita.memory import accelerator
from partita.prediction.communication_settings import INSIDE_NODES, Alternatives, quantized_alternatives
from partita.prediction.plan_settings import PlanSettings, StateSettings
from partita.prediction.search import Forecast, Search
from partita.prediction.step_timeline import StepTime
from partita.table.mesh_shape import STATE_AXES

# Number of plans considered for each setting of the states: that many of the fastest, and of those that compute
# fastest.
NUM_FASTEST = 3
# Minimal share of the step time that quantized collectives must save to be worth their loss of precision.
MIN_GAIN = 0.1


def communication_variants(search: Search, found: Sequence[Forecast], *, compress: bool = False) -> list[Forecast]:
    """Return variants of plans with other communication settings that are faster.

    Only plans that would be the best if their communication took no time get variants. These send more inside nodes,
    and are returned if they are faster than their plan. With ``compress``, variants with quantized collectives are also
    considered. They are returned if they are faster than all plans that lose less precision, by at least the share
    :data:`MIN_GAIN`.
    """
    origins, variants = list(_promising(found)), list[Forecast]()
    for settings, step_s in origins:
        variants += [
            each for each, variant_s in _with_communication(search, settings, INSIDE_NODES) if variant_s < step_s
        ]
    for alternatives in quantized_alternatives() if compress else ():
        best_s = min((each.time.total_s for each in [*found, *variants] if each.time is not None), default=0.0)
        quantized = [each for settings, _ in origins for each in _with_communication(search, settings, alternatives)]
        variants += [each for each, variant_s in quantized if variant_s < (1 - MIN_GAIN) * best_s]
    return variants


def _promising(found: Sequence[Forecast]) -> Iterator[tuple[PlanSettings, float]]:
    """Yield (plan, seconds of a step) for plans that would be the best without waits for communication."""
    times = [(each.settings, each.time) for each in found if each.time is not None]
    best_s = min((time.total_s for _, time in times), default=0.0)
    by_states = dict[StateSettings, list[tuple[PlanSettings, StepTime]]]()
    for settings, time in times:
        if settings.mesh.group_size(STATE_AXES) > 1 and time.compute_s < best_s:
            by_states.setdefault(settings.states, []).append((settings, time))
    for plans in by_states.values():
        fastest = nsmallest(NUM_FASTEST, plans, lambda each: each[1].total_s)
        least_compute = nsmallest(NUM_FASTEST, plans, lambda each: each[1].compute_s)
        yield from {settings: time.total_s for settings, time in fastest + least_compute}.items()


def _with_communication(
    search: Search, settings: PlanSettings, options: Iterable[Alternatives]
) -> Iterator[tuple[Forecast, float]]:
    """Yield (forecast, seconds of a step) of the plan with each of these communication settings, if it fits."""
    for option in options:
        all_states = (replace(settings.states, communication=communication) for communication in option)
        checked = (_with_engine_mesh(search, replace(settings, states=states)) for states in all_states)
        changed = next((each for each in checked if each is not None), None)
        if changed is not None and (found := search.forecast(changed)).time is not None:
            yield found, found.time.total_s


def _with_engine_mesh(search: Search, settings: PlanSettings) -> PlanSettings | None:
    """Return the plan with the mesh that the engine would use.

    Return None if its config is invalid, or if its communication settings need nodes and the mesh has only one.
    """
    machine, config = search.machine, search.merged(settings.sections())
    kind = accelerator.usual_kind(machine.one_memory)
    try:
        mesh = resolve(config, search.num_gpus, kind, machine.gpus_on_node(search.num_gpus)).mesh
    except ConfigError:
        return None
    needs_nodes = bool(settings.states.communication.zero_keys)
    return None if needs_nodes and mesh.node == 1 else replace(settings, mesh=mesh)
