"""Engine calls besides training: the position of a run, values gathered from or broadcast to all ranks, and resume."""

import re
from pathlib import Path

import pytest
import torch

import partita
from partita import ConfigError, PartitaError
from tests.kit.models import Stack, square_loss
from tests.kit.ranks import on_ranks
from tests.kit.training import rank

TITLE = f"Engine of Stack: {sum(param.numel() for param in Stack(2).parameters()):,} parameters in 3 units, "


def asked(folder: Path) -> str:
    config = {"zero": {"stage": 3}, "checkpoint": {"dir": str(folder)}}
    with partita.initialize(Stack(2), config) as engine:
        assert (engine.rank, engine.is_main, engine.device) == (rank(), rank() == 0, torch.device("cpu"))
        assert list(engine.parameters()) == list(engine.module.parameters())
        assert engine.resume() is None
        assert engine.global_step == 0
        for step in range(3):
            engine.backward(square_loss(engine.module, rank(), step))
            engine.step()
        assert engine.global_step == 3
        engine.save()
        found = repr(engine)
    assert repr(engine).startswith(TITLE + "closed")
    with partita.initialize(Stack(2), config) as engine:
        restored = engine.resume()
        assert restored is not None
        assert (restored.step, engine.global_step) == (3, 3)
        assert engine.resume(folder / "another") is None
        for source in (folder / "step-3", folder):
            restored = engine.resume(source)
            assert restored is not None
            assert (restored.step, restored.path) == (3, folder / "step-3")
    with (
        partita.initialize(Stack(2), {}) as engine,
        pytest.raises(ConfigError, match=r"name a folder, or set checkpoint"),
    ):
        engine.resume()
    return found


def test_where_a_loop_is_and_what_it_resumes(tmp_path: Path) -> None:
    for found in on_ranks(2, asked, tmp_path):
        assert found.splitlines() == [
            TITLE + "step 3",
            "mesh: 2 ranks = pipeline 1 x data 2 x sequence 1 x tensor 1",
            "zero: stage 3",
            "batch: set by the training loop, on each of 2 data ranks",
            "precision: compute fp32 (auto on cpu), master fp32, gradients fp32, moments fp32",
        ]


def gathered(parallel: dict[str, int]) -> list[list[float]]:
    with partita.initialize(Stack(2), {"parallel": parallel}) as engine:
        engine.barrier()
        data = engine.mesh.coordinate("data")
        values = torch.full((data + 1, 2), float(data), requires_grad=True)
        found = engine.gather(values)
        assert not found.requires_grad
        return found.tolist()


@pytest.mark.parametrize(("ranks", "parallel"), [(1, {}), (2, {}), (4, {"tensor": 2})])
def test_values_of_all_data_ranks(ranks: int, parallel: dict[str, int]) -> None:
    num = ranks // parallel.get("tensor", 1)
    expected = [[float(data)] * 2 for data in range(num) for _ in range(data + 1)]
    assert on_ranks(ranks, gathered, parallel) == [expected] * ranks


class NotPicklable:
    def __reduce__(self) -> str:
        raise ValueError("it is a file")


def broadcast(parallel: dict[str, int]) -> list[object]:
    with partita.initialize(Stack(2), {"parallel": parallel}) as engine:
        values: list[object] = [None, {"names": ["a", engine.rank]}, torch.full((3,), float(engine.rank)), b"x" * 10**6]
        found = [engine.broadcast(value if engine.is_main else engine.rank) for value in values]
        with pytest.raises(PartitaError, match="engine.broadcast: rank 0's value cannot be pickled"):
            engine.broadcast(NotPicklable() if engine.is_main else 0)
        return [found[:2], found[2].tolist(), found[3]]


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (1, {}),
        (2, {}),
        (4, {"tensor": 2}),
        (4, {"sequence": 2}),
        (4, {"pipeline": 2}),
        (4, {"pipeline": 2, "tensor": 2}),
    ],
)
def test_rank_0_s_value_is_returned_on_every_rank(ranks: int, parallel: dict[str, int]) -> None:
    expected = [[None, {"names": ["a", 0]}], [0.0] * 3, b"x" * 10**6]
    assert on_ranks(ranks, broadcast, parallel) == [expected] * ranks


def different() -> None:
    with partita.initialize(Stack(2), {}) as engine:
        cases = [
            (torch.zeros(()), r"rank 0 over data has one of shape [] and torch.float32: pass value[None]"),
            (
                torch.zeros(3, 2 + rank()),
                r"expected a tensor [n, 2] of torch.float32 on every rank; rank 1 over data has",
            ),
            (
                torch.zeros(3, dtype=(torch.long, torch.int)[rank()]),
                "of torch.int64 on every rank; rank 1 over data has",
            ),
        ]
        for values, message in cases:
            with pytest.raises(PartitaError, match=re.escape(message)):
                engine.gather(values)


def test_values_that_do_not_fit_together_are_refused_on_all_ranks() -> None:
    on_ranks(2, different)
