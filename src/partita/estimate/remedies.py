"""What to change in the config when memory has run out, ranked by the bytes that each change frees on a rank.

States are counted by the table as it is and as it would be, with the working memory of either.
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from partita.config.schema import Config, Offload
from partita.estimate.figures import format_bytes
from partita.estimate.memory import model_state_bytes
from partita.estimate.placement import chosen_tiers
from partita.estimate.working import working_bytes
from partita.plan.mesh_shape import MeshShape
from partita.plan.planned import PlannedSegment, PlannedUnit
from partita.plan.residence import Tier
from partita.plan.state_plan import Encodings, StatePlan, Tiers, further_stages, preset


@dataclass(frozen=True)
class Remedy:
    """A change to the config, and the bytes that it frees."""

    change: str
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.change} (frees about {format_bytes(self.num_bytes)})"


@dataclass(frozen=True)
class Situation:
    """What a rank holds as its config says: the units and the config, on a mesh."""

    units: Sequence[PlannedUnit]
    config: Config
    mesh: MeshShape
    num_moments: int

    def remedies(self, short: AbstractSet[Tier], activation_bytes: int, most: int = 3) -> list[Remedy]:
        """The changes that free most of the memories that are ``short`` (on a CPU the device and the host are one), of
        each kind the best one.

        Args:
            activation_bytes: what the forward kept for backward, as far as it is known.
        """
        before = self._held(self.units, short)
        best = list[Remedy]()
        for kind in self._kinds(short):
            freed = [Remedy(change, before - self._held(units, short)) for change, units in kind]
            best += [max(freed, key=lambda remedy: remedy.num_bytes)] if freed else []
        best.append(Remedy(self._smaller_batches(), activation_bytes // 2))
        useful = [remedy for remedy in best if remedy.num_bytes > 0]
        return sorted(useful, key=lambda remedy: -remedy.num_bytes)[:most]

    def _held(self, units: Sequence[PlannedUnit], tiers: AbstractSet[Tier]) -> int:
        states = model_state_bytes(units, self.mesh, None, self.num_moments)
        working = working_bytes(units, self.mesh, self.config.zero.prefetch_bytes, self.num_moments)
        return sum(
            sum(num for (_, name), num in states.items() if name == tier.value) + working.get(tier, 0) for tier in tiers
        )

    def _kinds(self, short: AbstractSet[Tier]) -> Iterator[list[tuple[str, list[PlannedUnit]]]]:
        """The changes of each kind, as (what to write, the units then); of equals the one that costs less comes first.

        Gradients that go where the optimizer states are have no setting of their own.
        """
        first = self.units[0].segments[0].row.name
        yield [
            (f"zero.stage: {stage}", self._with(name, self.config.zero.offload))
            for stage, name in further_stages(first)
        ]
        offload = self.config.zero.offload
        states = ["optimizer", "parameters"] + ["gradients"] * (offload.gradients != "auto")
        for state in states:
            tiers = [tier for tier in (Tier.HOST, Tier.DISK) if tier not in short]
            changed = [(tier.value, offload.model_copy(update={state: tier.value})) for tier in tiers]
            yield [(f"zero.offload.{state}: {value}", self._with(first, other)) for value, other in changed]

    def _with(self, name: str, offload: Offload) -> list[PlannedUnit]:
        """The units under another preset, or with other tiers."""
        return [
            PlannedUnit(
                unit.name,
                tuple(
                    PlannedSegment(
                        segment.layout,
                        preset(name, _encodings(segment.row), chosen_tiers(offload, _tiers(segment.row)), self.mesh),
                    )
                    for segment in unit.segments
                ),
            )
            for unit in self.units
        ]

    def _smaller_batches(self) -> str:
        batch = self.config.batch
        if isinstance(batch.micro, int) and batch.micro > 1:
            more = ", with twice batch.accumulate" if self.config.precision.gradients != "in_backward" else ""
            return f"batch.micro: {batch.micro // 2}{more}"
        return "half as many samples or tokens in a micro-batch"


def _encodings(row: StatePlan) -> Encodings:
    return Encodings(row.param_compute.encoding, row.master.encoding, row.grad_step.encoding, row.moments.encoding)


def _tiers(row: StatePlan) -> Tiers:
    return Tiers(row.param_rest.tier, row.grad_step.tier if row.gradients_rest else None, row.master.tier)
