"""The seed that rank 0 draws for ranks that compute one model together is saved, and restored if none is configured."""

from pathlib import Path
from typing import Any

import partita
from tests.kit import seeds
from tests.kit.ranks import on_ranks
from tests.parallel import dropout, zoo


def seed_of(engine: partita.Engine) -> int:
    streams = engine._parts.parallel.streams
    assert streams is not None
    return streams.seed


def losses(engine: partita.Engine, first: int, num_steps: int) -> list[float]:
    found = []
    for step in range(first, first + num_steps):
        loss = engine(**zoo.batch("gpt2", step)).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def resumes(folder: Path, parallel: dict[str, int]) -> None:
    """Check that a resumed process draws the masks that the saved one would have drawn."""

    def opened(number: int, **more: Any) -> partita.Engine:
        model = dropout.build("gpt2-eager")
        seeds.start(number)
        return partita.initialize(model, {"parallel": parallel, "optimizer": {"lr": 1e-3, "eps": 1e-4}, **more})

    with opened(5) as engine:
        losses(engine, 0, 2)
        engine.save(folder)
        seed, expected = seed_of(engine), losses(engine, 2, 2)
    with opened(99) as engine:
        assert seed_of(engine) != seed
        engine.load(folder)
        assert seed_of(engine) == seed
        assert losses(engine, 2, 2) == expected
    with opened(99, seed=7) as engine:
        engine.load(folder)
        assert seed_of(engine) == 7
        assert losses(engine, 2, 2) != expected


def test_a_resumed_run_draws_from_the_saved_seed(tmp_path: Path) -> None:
    on_ranks(2, resumes, tmp_path, {"tensor": 2})
