"""Changes to the config that free memory, ranked by the freed bytes per rank.

States and working memory are computed from the state table before and after each change.
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from partita.config.messages import format_bytes
from partita.config.schema import Config, Offload
from partita.layout.blueprint import Blueprint
from partita.layout.budget import MemoryBudget
from partita.layout.placement import resolve_tiers
from partita.layout.state_bytes import bytes_by_tier, model_state_bytes
from partita.layout.traffic import StepShape, step_traffic
from partita.table.planned import PlannedUnit
from partita.table.residence import Tier
from partita.table.state_plan import Encodings, StatePlan, Tiers, further_stages, lower_stages, preset
from partita.table.strategies import UNCOMPRESSED


@dataclass(frozen=True)
class Remedy:
    """A change to the config, and the bytes that it frees."""

    change: str
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.change} (frees about {format_bytes(self.num_bytes)})"


def find_remedies(
    blueprint: Blueprint, exhausted: AbstractSet[Tier], activation_bytes: int, most: int = 3
) -> list[Remedy]:
    """Return the best change of each kind, ranked by the bytes that it frees.

    Args:
        exhausted: the tiers that ran out of memory (on a CPU, the device and the host are one memory).
        activation_bytes: known bytes that the forward saved for backward.
    """
    before = _needed_bytes(blueprint.units, blueprint, exhausted)
    best = list[Remedy]()
    for kind in _changes_by_kind(blueprint, exhausted):
        freed = [Remedy(change, before - _needed_bytes(units, blueprint, exhausted)) for change, units in kind]
        best += [max(freed, key=lambda remedy: remedy.num_bytes)] if freed else []
    best.append(Remedy(_smaller_batches(blueprint.config), activation_bytes // 2))
    useful = [remedy for remedy in best if remedy.num_bytes > 0]
    return sorted(useful, key=lambda remedy: -remedy.num_bytes)[:most]


def settings_that_fit(blueprint: Blueprint, budget: MemoryBudget, most: int = 3) -> list[str]:
    """Return the changes of stage and tiers with which states and working memory fit, the smallest changes first.

    On one rank all stages are the same, so no stage is suggested.
    """
    name, offload = blueprint.units[0].row.name, blueprint.config.zero.offload
    splits = any(segment.mesh.num_ranks > 1 for unit in blueprint.units for segment in unit.segments)
    stages = [("", name), *((f"zero.stage: {stage}", further) for stage, further in further_stages(name) if splits)]
    offload_tiers = [tier.value for tier in (Tier.HOST, Tier.DISK) if not (budget.one_memory and tier is Tier.HOST)]
    tiers: list[dict[str, str]] = [{}]
    tiers += [{"optimizer": tier} for tier in offload_tiers] + [
        {"optimizer": tier, "parameters": tier} for tier in offload_tiers
    ]
    found = list[tuple[int, int, str]]()  # number of changes, and of changed tiers, which cost more than stages
    for change, further in stages:
        for states in tiers:
            units = changed_units(blueprint.units, further, offload.model_copy(update=states))
            needed = bytes_by_tier(model_state_bytes(units, None, blueprint.moments))
            needed += blueprint.working_bytes(units)
            words = [change] * bool(change) + [f"zero.offload.{state}: {tier}" for state, tier in states.items()]
            if words and not budget.shortfall(needed):
                found.append((len(words), len(states), ", ".join(words)))
    return [words for *_, words in sorted(found, key=lambda each: each[:2])[:most]]


def cheaper_stage(blueprint: Blueprint, budget: MemoryBudget) -> str | None:
    """Return a line that suggests a lower stage with less traffic.

    The stage must need less than half of the ``budget``; the other half is for activations. Return None if there is no
    such stage, or if offload, compressed communication or local steps are configured.
    """
    segments = [segment for unit in blueprint.units for segment in unit.segments]
    row, shape = blueprint.units[0].row, StepShape(blueprint.resolved.batch.accumulate)
    on_device = all(tier in (None, Tier.DEVICE) for s in segments for tier in vars(_tiers(s.row)).values())
    if not on_device or any(s.row.strategies != UNCOMPRESSED or s.row.separate_axes for s in segments):
        return None
    offload, name = blueprint.config.zero.offload, row.name
    current = _sent(changed_units(blueprint.units, name, offload), shape)
    best = None
    for stage, lower in reversed(lower_stages(name)):
        units = changed_units(blueprint.units, lower, offload)
        needed = bytes_by_tier(model_state_bytes(units, None, blueprint.moments))
        needed += blueprint.working_bytes(units)
        total, sent = sum(needed.values()), _sent(units, shape)
        if sent < (current if best is None else best[0]) and 2 * total < budget.device:
            best = sent, stage, total
    if best is None:
        return None
    sent, stage, total = best
    return (
        f"zero.stage: {stage} would fit, and be faster: {format_bytes(total)} of {format_bytes(budget.device)} free, "
        f"and {format_bytes(sent)} instead of {format_bytes(current)} sent in a step"
    )


def _sent(units: Sequence[PlannedUnit], shape: StepShape) -> int:
    report = step_traffic(units, shape)
    return sum(count.sent_bytes for key, count in report.rows.items() if key.purpose != "control")


def _needed_bytes(units: Sequence[PlannedUnit], blueprint: Blueprint, tiers: AbstractSet[Tier]) -> int:
    states = bytes_by_tier(model_state_bytes(units, None, blueprint.moments))
    working = blueprint.working_bytes(units)
    return sum((states + working)[tier] for tier in tiers)


def _changes_by_kind(
    blueprint: Blueprint, exhausted: AbstractSet[Tier]
) -> Iterator[list[tuple[str, list[PlannedUnit]]]]:
    """Yield the changes of each kind as (text for the config, changed units). Of equal changes, the cheaper is first.

    Gradients that are stored with the optimizer states have no separate setting.
    """
    offload, name = blueprint.config.zero.offload, blueprint.units[0].row.name
    yield [
        (f"zero.stage: {stage}", changed_units(blueprint.units, further, offload))
        for stage, further in further_stages(name)
    ]
    states = ["optimizer", "parameters"] + ["gradients"] * (offload.gradients != "auto")
    for state in states:
        tiers = [tier.value for tier in (Tier.HOST, Tier.DISK) if tier not in exhausted]
        changed = [(tier, offload.model_copy(update={state: tier})) for tier in tiers]
        yield [
            (f"zero.offload.{state}: {tier}", changed_units(blueprint.units, name, other)) for tier, other in changed
        ]


def changed_units(units: Sequence[PlannedUnit], name: str, offload: Offload) -> list[PlannedUnit]:
    """Return the units under the preset ``name``, with the tiers of ``offload`` that are not ``auto``."""
    changed = []
    for unit in units:
        segments = [
            replace(s, row=preset(name, _encodings(s.row), resolve_tiers(offload, _tiers(s.row)), s.mesh))
            for s in unit.segments
        ]
        changed.append(replace(unit, segments=tuple(segments)))
    return changed


def _smaller_batches(config: Config) -> str:
    micro = config.batch.micro
    if isinstance(micro, int) and micro > 1:
        more = ", with twice batch.accumulate" if config.precision.gradients != "in_backward" else ""
        return f"batch.micro: {micro // 2}{more}"
    return "half as many samples or tokens in a micro-batch"


def _encodings(row: StatePlan) -> Encodings:
    return Encodings(row.param_compute.encoding, row.master.encoding, row.grad_step.encoding, row.moments.encoding)


def _tiers(row: StatePlan) -> Tiers:
    return Tiers(row.param_stored.tier, row.grad_step.tier if row.stores_gradients else None, row.master.tier)
