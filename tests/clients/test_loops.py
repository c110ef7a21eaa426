"""Loops of many kinds, written with accelerate alone."""

from functools import cache
from pathlib import Path

import pytest

from tests.clients.launch import losses

SCRIPTS = Path(__file__).with_name("scripts")
LOOPS = {
    1: ["dcgan", "detector", "diffusion", "dino", "graph", "neural_ode", "ppo", "sac", "wgan"],
    # The others read or write parameters between steps without `engine.gathered`.
    3: ["dcgan", "detector", "graph"],
}


@cache
def plain(loop: str, folder: Path) -> list[float]:
    return losses([str(SCRIPTS / f"{loop}.py"), str(folder)], None, folder)


@pytest.mark.clients
@pytest.mark.parametrize(("stage", "loop"), [(stage, loop) for stage, loops in LOOPS.items() for loop in loops])
def test_losses_are_those_of_plain_data_parallelism(
    stage: int, loop: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = plain(loop, tmp_path_factory.getbasetemp())
    config = {"zero": {"stage": stage}, "precision": {"compute": "fp32"}}
    found = losses([str(SCRIPTS / f"{loop}.py"), str(tmp_path)], config, tmp_path)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)
