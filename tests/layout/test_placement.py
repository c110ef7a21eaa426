"""Tests of placement: it stays in the budget, more memory moves no state to a slower tier, and errors name the memory
that is too small.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from partita.config.schema import Offload
from partita.errors import ConfigError
from partita.layout.budget import MemoryBudget
from partita.layout.placement import Placement, describe_placement
from partita.layout.state_bytes import ADAM_MOMENTS, model_state_bytes
from partita.layout.working_bytes import most_working_bytes, working_bytes
from partita.table.mesh_shape import MeshShape
from partita.table.planned import PlannedSegment, PlannedUnit
from partita.table.residence import BF16, FP32, Tier
from partita.table.span import Entry, build_layout
from partita.table.state_plan import Encodings, Tiers, preset

PLENTY = 10**15
ONE_RANK, PLAIN = MeshShape(), Encodings()
CHOICES = ("none", "host", "disk", "auto")
ORDER = list(Tier)

shapes = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=3)
offloads = st.builds(
    Offload,
    parameters=st.sampled_from(CHOICES),
    optimizer=st.sampled_from(CHOICES),
    gradients=st.sampled_from(CHOICES),
)
used_encodings = st.builds(Encodings, st.sampled_from([FP32, BF16]), st.just(FP32), st.sampled_from([FP32, BF16]))


def placement(
    units: Sequence[Sequence[tuple[int, int]]],
    offload: Offload,
    name: str = "zero3",
    mesh: MeshShape = ONE_RANK,
    used: Encodings = PLAIN,
    frozen: Sequence[int] = (),
    on_host: bool = True,
) -> Placement:
    """Return a placement of units with the given shapes; the first unit is the root."""
    layouts = []
    for number, shapes_of_unit in enumerate(units):
        entries = [
            Entry(f"{number}.{i}", shape, used.compute, number not in frozen) for i, shape in enumerate(shapes_of_unit)
        ]
        layouts.append(build_layout(entries, mesh.data))
    names = [f"blocks.{number}" if number else "" for number in range(len(units))]

    def planned(number: int, tiers: Tiers) -> PlannedUnit:
        row = preset(name, used, tiers, mesh)
        segments = tuple(PlannedSegment(layout, row, mesh) for layout in layouts[number])
        return PlannedUnit(names[number], segments, ("",) * bool(number))

    return Placement(names, planned, offload, "auto", ADAM_MOMENTS, on_host)


placements = st.builds(
    placement,
    st.lists(shapes, min_size=1, max_size=6),
    offloads,
    st.sampled_from(["ddp", "zero1", "zero2", "zero3", "zero3-kept", "zero3-once", "hierarchical"]),
    st.sampled_from([MeshShape(), MeshShape(data=2), MeshShape(data=4, node=2)]),
    used_encodings,
    st.lists(st.integers(0, 5), max_size=2),
    st.booleans(),
)


def used_bytes(made: Placement, tiers: Sequence[Tiers]) -> dict[Tier, int]:
    """Return the bytes used per tier if the units are planned on these tiers, from the public estimates."""
    units = [made.planned(number, chosen) for number, chosen in enumerate(tiers)]
    states = model_state_bytes(units, None, made.moments)
    working = most_working_bytes(units, made.prefetch, made.moments, on_host=made.on_host)
    return {tier: sum(num for (_, name), num in states.items() if name == tier.value) + working[tier] for tier in Tier}


def budget_of(shares: tuple[float, float], made: Placement, one_memory: bool) -> MemoryBudget:
    """Return a budget of device and host memory as shares of the bytes needed for everything."""
    everything = sum(used_bytes(made, made.tiers(MemoryBudget(PLENTY, PLENTY, PLENTY))).values())
    device, host = (int(share * everything) for share in shares)
    return MemoryBudget(device, 0 if one_memory else host, PLENTY, one_memory)


shares = st.tuples(st.floats(0, 1.5), st.floats(0, 1.5))


def placed(made: Placement, budget: MemoryBudget) -> list[Tiers] | None:
    try:
        return made.tiers(budget)
    except ConfigError:
        return None


@given(placements, shares, st.booleans())
def test_what_is_planned_for_is_a_bound(made: Placement, share: tuple[float, float], one_memory: bool) -> None:
    """The working bytes assumed by the placement are a bound on those computed with the final buckets."""
    if (tiers := placed(made, budget_of(share, made, one_memory))) is not None:
        units = [made.planned(number, chosen) for number, chosen in enumerate(tiers)]
        found = working_bytes(units, made.prefetch, made.moments, on_host=made.on_host)
        most = most_working_bytes(units, made.prefetch, made.moments, on_host=made.on_host)
        assert all(found[tier] <= most[tier] for tier in Tier)


@given(placements, shares, st.booleans())
def test_never_over_budget(made: Placement, share: tuple[float, float], one_memory: bool) -> None:
    budget = budget_of(share, made, one_memory)
    tiers = placed(made, budget)
    assume(tiers is not None)
    assert tiers is not None
    used = used_bytes(made, tiers)
    if one_memory:
        assert used[Tier.DEVICE] + used[Tier.HOST] <= budget.device
    else:
        assert used[Tier.DEVICE] <= budget.device
        assert used[Tier.HOST] <= budget.host
    assert used[Tier.DISK] <= budget.disk


@given(placements, shares, shares, st.booleans())
def test_more_memory_brings_nothing_further_away(
    made: Placement, share: tuple[float, float], more: tuple[float, float], one_memory: bool
) -> None:
    less = budget_of(share, made, one_memory)
    added = budget_of(more, made, one_memory)
    greater = replace(less, device=less.device + added.device, host=less.host + added.host)
    before, after = placed(made, less), placed(made, greater)
    assume(before is not None)
    assert before is not None
    assert after is not None, "what fits fits into more"
    for one, other in zip(before, after, strict=True):
        for state in ("parameters", "gradients", "optimizer"):
            assert ORDER.index(getattr(other, state)) <= ORDER.index(getattr(one, state))


@given(placements)
def test_everything_is_on_the_device_where_it_fits(made: Placement) -> None:
    for chosen in made.tiers(MemoryBudget(PLENTY, 0 if _may_be_near(made.offload) else PLENTY, PLENTY)):
        for state in ("parameters", "optimizer"):
            if getattr(made.offload, state) == "auto":
                assert getattr(chosen, state) is Tier.DEVICE


def _may_be_near(offload: Offload) -> bool:
    return not {"host", "disk"} & {offload.parameters, offload.optimizer, offload.gradients}


def test_everything_is_on_disk_where_nothing_else_fits() -> None:
    made = placement([[(300, 40)]] * 8, Offload(parameters="auto", optimizer="auto"))
    on_disk = [Tiers(Tier.DISK, Tier.DISK, Tier.DISK)] * 8
    least = used_bytes(made, on_disk)
    tiers = made.tiers(MemoryBudget(least[Tier.DEVICE], least[Tier.HOST], PLENTY))
    assert tiers[1:] == on_disk[1:]
    # The root unit keeps its slot all the time it is in use: stored on the device, it takes no more memory.
    assert tiers[0] == Tiers(Tier.DEVICE, Tier.DISK, Tier.DISK)


def test_parameters_come_first_and_the_models_order_counts() -> None:
    """The states of five equal units move to the host one by one as the budget shrinks, the last unit's first.

    All optimizer states move before the first parameters.
    """
    made = placement([[(300, 40)]] * 5, Offload(parameters="auto", optimizer="auto"), mesh=MeshShape(data=2))
    every = made.tiers(MemoryBudget(PLENTY, PLENTY, PLENTY))
    assert every == [Tiers()] * 5
    full = used_bytes(made, every)[Tier.DEVICE]
    seen = [every]
    for budget in range(full, 0, -full // 50):
        tiers = placed(made, MemoryBudget(budget, PLENTY, PLENTY))
        if tiers is not None and tiers != seen[-1]:
            seen.append(tiers)
    assert seen[-1] == [Tiers(Tier.HOST, Tier.HOST, Tier.HOST)] * 5
    for tiers in seen:
        sequence = [t.parameters for t in tiers] + [t.optimizer for t in tiers]
        assert all(ORDER.index(a) <= ORDER.index(b) for a, b in pairwise(sequence))
        assert all(t.gradients is t.optimizer for t in tiers)
    assert len(seen) == 11


def test_what_the_config_names_is_kept() -> None:
    made = placement([[(300, 40)]] * 3, Offload(parameters="none", optimizer="auto", gradients="host"))
    small = placed(made, MemoryBudget(400_000, PLENTY, PLENTY))
    assert small is not None
    assert {t.parameters for t in small} == {Tier.DEVICE}
    assert {t.gradients for t in small} == {Tier.HOST}
    assert small[-1].optimizer is Tier.HOST


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (
            MemoryBudget(10, PLENTY, PLENTY),
            r"do not fit \(device\)\n  device +0 B of states .* 10 B may be used.*\n.*\n.*\nFix:.*zero.stage",
        ),
        (
            MemoryBudget(PLENTY, 10, PLENTY),
            r"do not fit \(host\).*\n(.*\n)*Fix: set zero.offload.parameters .* auto or disk",
        ),
        (MemoryBudget(1_000_000, 0, 10), r"do not fit"),
        (
            MemoryBudget(10, 0, 10, one_memory=True),
            r"do not fit \(device and disk\)(.*\n)+.*the device's memory is the host's",
        ),
    ],
)
def test_what_is_lacking_is_said(budget: MemoryBudget, said: str) -> None:
    optimizer = "host" if budget.host == 10 else "auto"
    made = placement([[(300, 400)]] * 5, Offload(parameters="auto", optimizer=optimizer))
    with pytest.raises(ConfigError, match=said):
        made.tiers(budget)


def test_a_line_says_where_states_rest() -> None:
    held = {
        ("parameters", "device"): 1_200_000_000,
        ("master", "host"): 4_000_000,
        ("moments", "host"): 8_000_000,
        ("moments", "disk"): 5_000,
        ("gradients", "device"): 7,
    }
    assert (
        describe_placement(held)
        == "offload: parameters 1.2 GB device; gradients 7 B device; optimizer 12 MB host, 5 kB disk"
    )
