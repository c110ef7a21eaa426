"""Small models of many fields train in bf16 as close to fp32 as under torch.autocast, with fp32 outputs."""

import pytest

from benchmarks import _zoo
from benchmarks._zoo_plain import PLAIN
from tests.kit.plans import sampled
from tests.kit.ranks import on_ranks

NAMES = tuple(_zoo.models())
OF_TRANSFORMERS = tuple(name for name in NAMES if name not in PLAIN)
# All models together take minutes.
TIMEOUT_S = 1200.0


def test_there_are_enough() -> None:
    assert len(PLAIN) >= 60
    assert len(OF_TRANSFORMERS) >= 40


@pytest.mark.parametrize("way", ["the engine", "accelerate"])
def test_a_sample_trains_as_under_autocast(way: str) -> None:
    names = NAMES[(way == "accelerate") :: 9]
    assert on_ranks(2, _zoo.failures, names, way, 3, timeout=TIMEOUT_S) == [[]] * 2


def test_a_sample_trains_in_the_trainer() -> None:
    assert on_ranks(2, _zoo.failures, OF_TRANSFORMERS[::12], "the Trainer", 3, timeout=TIMEOUT_S) == [[]] * 2


DECODERS = ["Llama GPT2", "Mistral Qwen2 Qwen3 Gemma2 Olmo2 GPTNeoX OPT"]


@pytest.mark.parametrize("axis", ["tensor", "sequence"])
@pytest.mark.parametrize("names", sampled(DECODERS, DECODERS[0]))
def test_decoders_train_so_on_other_axes(names: str, axis: str) -> None:
    assert on_ranks(2, _zoo.failures, names.split(), axis, 3, timeout=TIMEOUT_S) == [[]] * 2


@pytest.mark.thorough
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_model_trains_as_under_autocast(stage: int, ranks: int) -> None:
    assert on_ranks(ranks, _zoo.failures, NAMES, "the engine", stage, timeout=TIMEOUT_S) == [[]] * ranks


@pytest.mark.thorough
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(("way", "names"), [("accelerate", NAMES), ("the Trainer", OF_TRANSFORMERS)])
@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 2), (2, 2), (3, 2)])
def test_every_model_trains_through_other_libraries(way: str, names: tuple[str, ...], stage: int, ranks: int) -> None:
    assert on_ranks(ranks, _zoo.failures, names, way, stage, timeout=TIMEOUT_S) == [[]] * ranks
