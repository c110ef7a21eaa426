"""Variants of the plans that a search has found, with other communication settings."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import nsmallest

from partita.config.resolve import resolve
from partita.config.schema import Config
from partita.errors import ConfigError
from partita.forecast.choice import Choice, StateSettings
from partita.forecast.search import Forecast, Search
from partita.forecast.sending import INSIDE_NODES, Ways, as_codes
from partita.memory import accelerator
from partita.plan.mesh_shape import STATE_AXES
from partita.planner.timeline import StepTime

# Number of plans considered for each setting of the states: that many of the fastest, and of those that compute
# fastest.
NUM_FASTEST = 3
# Minimal share of the step time that quantized collectives must save to be worth their loss of precision.
WORTH = 0.1


def sent_otherwise(search: Search, found: Sequence[Forecast], *, compress: bool = False) -> list[Forecast]:
    """Return variants of plans with other communication settings that are faster.

    Only plans that would be the best if their communication took no time get variants. These send more inside nodes,
    and are returned if they are faster than their plan. With ``compress``, variants with quantized collectives are also
    considered. They are returned if they are faster than all plans that lose less precision, by at least the share
    :data:`WORTH`.
    """
    origins, variants = list(_promising(found)), list[Forecast]()
    for choice, step_s in origins:
        variants += [
            each for each, variant_s in _with_communication(search, choice, INSIDE_NODES) if variant_s < step_s
        ]
    for alternatives in as_codes() if compress else ():
        best_s = min((each.time.total_s for each in [*found, *variants] if each.time is not None), default=0.0)
        quantized = [each for choice, _ in origins for each in _with_communication(search, choice, alternatives)]
        variants += [each for each, variant_s in quantized if variant_s < (1 - WORTH) * best_s]
    return variants


def _promising(found: Sequence[Forecast]) -> Iterator[tuple[Choice, float]]:
    """Yield (plan, seconds of a step) for plans that would be the best without waits for communication."""
    times = [(each.choice, each.time) for each in found if each.time is not None]
    best_s = min((time.total_s for _, time in times), default=0.0)
    by_states = dict[StateSettings, list[tuple[Choice, StepTime]]]()
    for choice, time in times:
        if choice.mesh.group_size(STATE_AXES) > 1 and time.compute_s < best_s:
            by_states.setdefault(choice.state_settings, []).append((choice, time))
    for plans in by_states.values():
        fastest = nsmallest(NUM_FASTEST, plans, lambda each: each[1].total_s)
        least_compute = nsmallest(NUM_FASTEST, plans, lambda each: each[1].compute_s)
        yield from {choice: time.total_s for choice, time in fastest + least_compute}.items()


def _with_communication(
    search: Search, choice: Choice, alternatives: Iterable[Ways]
) -> Iterator[tuple[Forecast, float]]:
    """Yield (forecast, seconds of a step) of the plan with each of these communication settings, if it fits."""
    for settings_to_try in alternatives:
        all_states = (replace(choice.state_settings, sending=sending) for sending in settings_to_try)
        checked = (
            _with_engine_mesh(search, replace(choice, state_settings=state_settings)) for state_settings in all_states
        )
        changed = next((each for each in checked if each is not None), None)
        if changed is not None and (found := search.forecast(changed)).time is not None:
            yield found, found.time.total_s


def _with_engine_mesh(search: Search, choice: Choice) -> Choice | None:
    """Return the plan with the mesh that the engine would use.

    Return None if its config is invalid, or if its communication settings need nodes and the mesh has only one.
    """
    machine, sections = search.machine, choice.sections()
    given = search.merged(sections).model_dump(exclude_unset=True)
    given |= {name: sections.get(name, {}) for name in ("batch", "parallel")}
    kind = accelerator.usual_kind(machine.one_memory)
    try:
        mesh = resolve(Config(**given), search.num_gpus, kind, machine.gpus_on_node(search.num_gpus)).mesh
    except ConfigError:
        return None
    needs_nodes = bool(choice.state_settings.sending.zero)
    return None if needs_nodes and mesh.node == 1 else replace(choice, mesh=mesh)
