"""The tiers of each unit's states: those that the config names, and for ``auto`` as much as fits in each memory.

States get device memory in the order of the bytes that a step moves for each byte stored elsewhere. Parameters are read
for forward and for backward of every micro-batch and written once; master weights and moments are read and written once
at most (on the host they do not move at all: the update is computed there). So the parameters of all units come first,
then the optimizer states of all units, together with their gradients.

Among units, those that the model uses first come first: at the start of the next forward no computation hides the
transfer of their states, while transfers for later units are hidden by the computation before them. The root unit
contains all others and is in use throughout, so it is the very first.

Along this order tiers never get closer to the device. This leaves a gap at the end of a memory, but makes the placement
monotone: more memory moves no state further away.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from partita.config.schema import Offload
from partita.errors import ConfigError
from partita.plan.planned import PlannedUnit
from partita.plan.residence import Tier
from partita.plan.state_plan import Tiers
from partita.planner.budget import MemoryBudget
from partita.planner.figures import format_bytes
from partita.planner.memory import bytes_by_tier, model_state_bytes
from partita.planner.working import most_working_bytes

TIERS = {"none": Tier.DEVICE, "host": Tier.HOST, "disk": Tier.DISK}
STATES = ("parameters", "optimizer")  # in the order in which they get the device
SHOWN = {"parameters": "parameters", "gradients": "gradients", "master": "optimizer", "moments": "optimizer"}


def chosen_tiers(offload: Offload, auto: Tiers) -> Tiers:
    """Return a unit's tiers: those that the config names, and those of ``auto`` where it leaves the choice."""
    optimizer = TIERS.get(offload.optimizer, auto.optimizer)
    gradients = None
    if auto.gradients is not None:
        gradients = optimizer if offload.gradients == "auto" else TIERS[offload.gradients]
    return Tiers(TIERS.get(offload.parameters, auto.parameters), gradients, optimizer)


def leaves_a_choice(offload: Offload) -> bool:
    return "auto" in (offload.parameters, offload.optimizer)


@dataclass(frozen=True)
class Placement:
    """The choice of tiers for a model's units.

    ``planned(number, tiers)`` returns the unit of that number with its states in these tiers; ``names`` are the units'
    names.
    """

    names: Sequence[str]
    planned: Callable[[int, Tiers], PlannedUnit]
    offload: Offload
    prefetch: int | str
    num_moments: int
    on_host: bool
    _units: dict[tuple[int, Tiers], tuple[PlannedUnit, Counter[Tier]]] = field(default_factory=dict)

    def tiers(self, budget: MemoryBudget) -> list[Tiers]:
        """Return the tiers of each unit.

        Raises:
            ConfigError: the states and the working memory do not fit in any placement.
        """
        order = sorted(range(len(self.names)), key=lambda number: bool(self.names[number]))
        wanted = [state for state in STATES if getattr(self.offload, state) == "auto"]
        items = [(number, state) for state in wanted for number in order]
        every = range(len(items), -1, -1)

        def fits(near: int, far: int, tier: Tier) -> bool:
            states, working = self._needed(self._divided(items, near, far))
            return tier not in budget.lacking(states + working)

        # What the device holds does not depend on how the rest is divided, and the host and the disk need the less the
        # more is nearer: so each prefix is found by itself.
        near = next((num for num in every if fits(num, num, Tier.DEVICE)), 0)
        far = near
        if not budget.one_memory:
            far = next((num for num in every[: len(items) - near] if fits(near, num, Tier.HOST)), near)
        tiers = self._divided(items, near, far)
        states, working = self._needed(tiers)
        if lacking := budget.lacking(states + working):
            raise _too_large(states, working, budget, lacking)
        return tiers

    def _divided(self, items: Sequence[tuple[int, str]], near: int, far: int) -> list[Tiers]:
        """Return each unit's tiers: the first ``near`` items are on the device, those before ``far`` on the host,
        others on disk.
        """
        chosen = [Tiers() for _ in self.names]
        for place, (number, state) in enumerate(items):
            tier = Tier.DEVICE if place < near else Tier.HOST if place < far else Tier.DISK
            chosen[number] = replace(chosen[number], **{state: tier})
        return [chosen_tiers(self.offload, tiers) for tiers in chosen]

    def _needed(self, tiers: Sequence[Tiers]) -> tuple[Counter[Tier], Counter[Tier]]:
        """Return the bytes of states, and of working memory, by tier."""
        units, states = list[PlannedUnit](), Counter[Tier]()
        for number, chosen in enumerate(tiers):
            if (number, chosen) not in self._units:
                unit = self.planned(number, chosen)
                self._units[number, chosen] = unit, bytes_by_tier(model_state_bytes([unit], None, self.num_moments))
            unit, held = self._units[number, chosen]
            units.append(unit)
            states.update(held)
        return states, most_working_bytes(units, self.prefetch, self.num_moments, on_host=self.on_host)


def _too_large(
    states: Counter[Tier], working: Counter[Tier], budget: MemoryBudget, lacking: Sequence[Tier]
) -> ConfigError:
    lines = [
        f"  {tier.value:<7}{format_bytes(states[tier]):>8} of states + {format_bytes(working[tier]):>7} of working "
        f"memory; {format_bytes(budget.of(tier)):>7} may be used"
        for tier in Tier
    ]
    if budget.one_memory:
        lines[1] = lines[1].partition(";")[0] + "; the device's memory is the host's"
    fixes = {
        Tier.DEVICE: "start more ranks or raise zero.stage; name smaller modules in zero.units, or set "
        "zero.prefetch_bytes: 0",
        Tier.HOST: "set zero.offload.parameters and zero.offload.optimizer to auto or disk, or start fewer ranks "
        "on a node",
        Tier.DISK: "let zero.offload.path name a folder on a larger disk (files in memory do not count), or raise "
        "zero.stage",
    }
    fix = "; ".join(fixes[tier] for tier in lacking)
    where = " and ".join(tier.value for tier in lacking)
    return ConfigError("\n".join([f"zero.offload: the states of a rank do not fit ({where})", *lines, f"Fix: {fix}."]))


def describe_placement(held: Mapping[tuple[str, str], int]) -> str:
    """Describe in one line where a rank's states are stored, from the bytes that :func:`model_state_bytes` returns."""
    sums = Counter[tuple[str, str]]()
    for (state, tier), num_bytes in held.items():
        sums[SHOWN[state], tier] += num_bytes
    parts = []
    for state in dict.fromkeys(SHOWN.values()):
        places = [f"{format_bytes(sums[state, tier.value])} {tier.value}" for tier in Tier if sums[state, tier.value]]
        if places:
            parts.append(f"{state} {', '.join(places)}")
    return "offload: " + "; ".join(parts)
