from tests.kit import CASES, PLANS, assert_same_bits, on_ranks, train


def stage_3_trains_as_stage_0() -> None:
    assert_same_bits(train(CASES["llama"], PLANS["3"]), train(CASES["llama"], PLANS["0"]))


def test_stage_3_trains_as_stage_0() -> None:
    on_ranks(4, stage_3_trains_as_stage_0)
