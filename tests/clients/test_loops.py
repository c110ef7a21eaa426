"""Scripts of many kinds, written only with accelerate or a library's trainer."""

from functools import cache
from pathlib import Path

import pytest

from tests.clients.launch import losses

SCRIPTS = Path(__file__).with_name("scripts")
LOOPS = ["dcgan", "detector", "diffusion", "dino", "graph", "moco", "neural_ode", "ppo", "sac", "wgan"]
TRAINERS = ["peft_lora", "sentence_embedding", "trainer"]


@cache
def plain(script: str, folder: Path) -> list[float]:
    return losses([str(SCRIPTS / f"{script}.py"), str(folder)], None, folder)


@pytest.mark.clients
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("script", LOOPS + TRAINERS)
def test_losses_are_those_of_plain_data_parallelism(
    script: str, stage: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = plain(script, tmp_path_factory.getbasetemp())
    config = {"zero": {"stage": stage}, "precision": {"compute": "fp32"}}
    found = losses([str(SCRIPTS / f"{script}.py"), str(tmp_path)], config, tmp_path)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)
