"""The tiers of each unit's states: those of the config, and for ``auto`` the fastest memories in which they fit.

States get device memory in the order of the bytes that a step moves for each offloaded byte. Parameters are read for
forward and for backward of every micro-batch and written once. Master weights and moments are read and written at most
once; on the host they do not move at all, because the update is computed there. So the parameters of all units come
first, then the optimizer states of all units, with their gradients.

Units are in the order of the forward: at the start of the next forward no computation hides the transfer of the first
units' states, while transfers for later units overlap with the computation of earlier ones. The root unit contains all
other units and is in use throughout, so it is the first.

Along this order tiers never get closer to the device. This leaves a gap at the end of a memory, but makes the placement
monotone: additional memory never moves a state to a slower tier.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from partita.config.messages import format_bytes
from partita.config.schema import Offload
from partita.errors import ConfigError
from partita.layout.budget import MemoryBudget
from partita.layout.state_bytes import Moments, bytes_by_tier, model_state_bytes
from partita.layout.working_bytes import most_working_bytes
from partita.table.planned import PlannedUnit
from partita.table.residence import Tier
from partita.table.state_plan import Tiers

TIERS = {"none": Tier.DEVICE, "host": Tier.HOST, "disk": Tier.DISK}
STATES = ("parameters", "optimizer")  # in the order in which they get device memory
SHOWN = {"parameters": "parameters", "gradients": "gradients", "master": "optimizer", "moments": "optimizer"}


def resolve_tiers(offload: Offload, auto: Tiers) -> Tiers:
    """Return a unit's tiers: those of the config, and those of ``auto`` for states that are ``auto`` in the config."""
    optimizer = TIERS.get(offload.optimizer, auto.optimizer)
    gradients = None
    if auto.gradients is not None:
        gradients = optimizer if offload.gradients == "auto" else TIERS[offload.gradients]
    return Tiers(TIERS.get(offload.parameters, auto.parameters), gradients, optimizer)


def has_auto_tiers(offload: Offload) -> bool:
    """Return True if the config has a tier that is ``auto``."""
    return "auto" in (offload.parameters, offload.optimizer)


@dataclass(frozen=True)
class Placement:
    """The choice of tiers for a model's units, with these ``names``.

    ``planned(number, tiers)`` returns the unit of that number with its states in these tiers.
    """

    names: Sequence[str]
    planned: Callable[[int, Tiers], PlannedUnit]
    offload: Offload
    prefetch: int | str
    moments: Moments
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

        def fits(on_device: int, on_host_or_device: int, tier: Tier) -> bool:
            states, working = self._needed(self._tiers_in_order(items, on_device, on_host_or_device))
            return tier not in budget.shortfall(states + working)

        # The bytes on the device do not depend on the tiers of the other states, and the host and the disk need less
        # when faster tiers store more. So each prefix can be found separately.
        on_device = next((num for num in every if fits(num, num, Tier.DEVICE)), 0)
        on_host_or_device = on_device
        if not budget.one_memory:
            on_host_or_device = next(
                (num for num in every[: len(items) - on_device] if fits(on_device, num, Tier.HOST)), on_device
            )
        tiers = self._tiers_in_order(items, on_device, on_host_or_device)
        states, working = self._needed(tiers)
        if shortfall := budget.shortfall(states + working):
            raise _too_large(states, working, budget, shortfall)
        return tiers

    def _tiers_in_order(self, items: Sequence[tuple[int, str]], on_device: int, on_host_or_device: int) -> list[Tiers]:
        """Return each unit's tiers.

        The first ``on_device`` items are on the device, the next ones up to ``on_host_or_device`` on the host, the
        remaining ones on disk.
        """
        chosen = [Tiers() for _ in self.names]
        for place, (number, state) in enumerate(items):
            tier = Tier.DEVICE if place < on_device else Tier.HOST if place < on_host_or_device else Tier.DISK
            chosen[number] = replace(chosen[number], **{state: tier})
        return [resolve_tiers(self.offload, tiers) for tiers in chosen]

    def _needed(self, tiers: Sequence[Tiers]) -> tuple[Counter[Tier], Counter[Tier]]:
        """Return the bytes of states, and of working memory, by tier."""
        units, states = list[PlannedUnit](), Counter[Tier]()
        for number, chosen in enumerate(tiers):
            if (number, chosen) not in self._units:
                unit = self.planned(number, chosen)
                self._units[number, chosen] = unit, bytes_by_tier(model_state_bytes([unit], None, self.moments))
            unit, held = self._units[number, chosen]
            units.append(unit)
            states.update(held)
        return states, most_working_bytes(units, self.prefetch, self.moments, on_host=self.on_host)


def _too_large(
    states: Counter[Tier], working: Counter[Tier], budget: MemoryBudget, shortfall: Sequence[Tier]
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
    fix = "; ".join(fixes[tier] for tier in shortfall)
    where = " and ".join(tier.value for tier in shortfall)
    return ConfigError("\n".join([f"zero.offload: the states of a rank do not fit ({where})", *lines, f"Fix: {fix}."]))


def describe_placement(held: Mapping[tuple[str, str], int]) -> str:
    """Describe in one line the tiers of a rank's states, from the bytes that :func:`model_state_bytes` returns."""
    sums = Counter[tuple[str, str]]()
    for (state, tier), num_bytes in held.items():
        sums[SHOWN[state], tier] += num_bytes
    texts = []
    for state in dict.fromkeys(SHOWN.values()):
        places = [f"{format_bytes(sums[state, tier.value])} {tier.value}" for tier in Tier if sums[state, tier.value]]
        if places:
            texts.append(f"{state} {', '.join(places)}")
    return "offload: " + "; ".join(texts)
