"""The parity matrix: every stage computes the same bits, and agrees with plain PyTorch, on every kind of model.

`python -m benchmarks.parity` runs all of it and reports the number of digits that agree.
"""

import math
from itertools import product

import pytest
import torch

from tests.features import parity
from tests.features.parity import CLIP, CUT_LR, CUT_SCHEDULE, STEPS, Cut, TrainingRun
from tests.kit.models import CASES
from tests.kit.plans import sampled

TOLERANCE = 1e-5
HALF_TOLERANCE = 0.02
# Tolerance against DDP, whose clipping sums the norm in fp32: batch norm amplifies its error (1.6e-5 observed).
AMPLIFIED = {"resnet": 5e-5}

each_case = pytest.mark.parametrize("name", CASES)


def check(name: str, world: int, plans: tuple[str, ...]) -> None:
    verdict = parity.judge(name, world, plans)
    assert len(verdict.from_stage_0) == 2 * len(plans)
    assert {key: unequal for key, unequal in verdict.from_stage_0.items() if unequal} == {}
    for errors in verdict.from_plain.values():
        assert {name: amount for name, amount in errors.items() if not amount <= TOLERANCE} == {}
    assert all(0 < amount <= HALF_TOLERANCE for amount in verdict.from_fp32.values()), verdict.from_fp32
    assert verdict.clipped >= STEPS // 2, f"the norms are rarely above {CLIP}: clipping is hardly tried"
    assert verdict.fall > 0.005, "the model does not learn: losses say little about weights"


SAMPLE = (("decoder", 1), ("llama", 2), ("resnet", 2), ("mixtral", 2))


@pytest.mark.parametrize(("name", "world"), sampled(product(CASES, (1, 2)), *SAMPLE))
def test_stages_agree_bit_by_bit(name: str, world: int) -> None:
    check(name, world, parity.STAGES)


@pytest.mark.parametrize("name", sampled(["gpt2", "resnet", "mixtral"], "gpt2"))
def test_stages_agree_bit_by_bit_on_four_ranks(name: str) -> None:
    check(name, 4, ("0", "2", "3"))


def test_hierarchical_agrees_bit_by_bit_on_two_nodes_of_two_ranks() -> None:
    check("decoder", 4, ("0", "hierarchical"))


@each_case
def test_training_agrees_with_ddp(name: str) -> None:
    errors, tolerance = parity.ddp_errors(name, 2), AMPLIFIED.get(name, TOLERANCE)
    assert {what: amount for what, amount in errors.items() if not amount <= tolerance} == {}


EVERY_STAGE = ("1", "2", "3")
# Stages by number of ranks: each stage, and each way to cut the batch, occurs once.
ONE_STAGE_EACH = {1: ("1",), 2: ("2",), 4: ("3",)}


@pytest.mark.parametrize(
    ("name", "stages"),
    sampled(
        product(("decoder", "resnet"), (ONE_STAGE_EACH, dict.fromkeys((1, 2, 4), EVERY_STAGE))),
        ("decoder", ONE_STAGE_EACH),
    ),
)
def test_one_batch_cut_in_any_way_gives_the_same_curve(name: str, stages: dict[int, tuple[str, ...]]) -> None:
    curves = dict[tuple[str, Cut], parity.Curve]()
    for world, plans in stages.items():
        curves |= parity.all_curves(name, plans, (world,))
    ways = {1: 4, 2: 3, 4: 2}
    assert len(curves) == sum(len(plans) * 2 * ways[world] for world, plans in stages.items())
    reference = curves["1", Cut(1, 1, "step")]
    apart = {key: parity.curve_error(curve, reference) for key, curve in curves.items()}
    assert {key: amount for key, amount in apart.items() if not amount <= TOLERANCE} == {}


def test_learning_rate_warms_up_and_falls_along_a_cosine() -> None:
    curve = parity.all_curves("lstm", ("0",), (1,))["0", Cut(1, 2, "train_batch")]
    least = CUT_SCHEDULE["min_lr"]
    falling = [least + (CUT_LR - least) * 0.5 * (1 + math.cos(math.pi * part / 4)) for part in range(4)]
    assert curve.lrs == pytest.approx([CUT_LR / 3, CUT_LR * 2 / 3, *falling])


# -- the comparison itself ---------------------------------------------------------------------------------------------


def course(**changes: float) -> TrainingRun:
    values = {"loss": 2.0, "norm": 1.0, "gradient": 0.5, "weight": 0.25, "buffer": 4.0} | changes
    return TrainingRun(
        [1.0, values["loss"]],
        [3.0, values["norm"]],
        {"a": torch.tensor([1.0, values["gradient"]])},
        {"a": torch.tensor([values["weight"], -1.0])},
        {"a": torch.tensor([values["buffer"]])},
    )


def test_last_bit_of_anything_is_a_difference() -> None:
    assert parity.differences(course(), course()) == {}
    for what, value, label in (
        ("loss", 2.0, "loss of step 1"),
        ("norm", 1.0, "norm of step 1"),
        ("gradient", 0.5, "gradient a"),
        ("weight", 0.25, "weight a"),
        ("buffer", 4.0, "buffer a"),
    ):
        changed = course(**{what: value * (1 + 2**-23)})
        assert list(parity.differences(changed, course())) == [label]


def test_signs_of_zero_and_dtypes_are_told_apart() -> None:
    zero = torch.zeros(2)
    assert parity.same_bits(zero, zero.clone())
    assert not parity.same_bits(zero, -zero)
    assert not parity.same_bits(zero, zero.double())


def test_errors_that_are_not_finite_are_infinite() -> None:
    bad = torch.tensor([1.0, math.nan])
    assert parity.error(bad, torch.ones(2)) == math.inf
    assert parity.error(torch.ones(2), bad) == math.inf
    assert parity.largest_ratio([1.0, math.nan], [1.0, 1.0]) == math.inf


def test_gradient_that_should_be_zero_may_be_rounding_and_no_more() -> None:
    plain = {"key.bias": torch.tensor([1e-9]), "weight": torch.tensor([1.0])}
    assert parity.gradient_errors(plain | {"key.bias": torch.tensor([-3e-9])}, plain)["key.bias"] == 0.0
    assert parity.gradient_errors(plain | {"key.bias": torch.tensor([1e-3])}, plain)["key.bias"] == math.inf
