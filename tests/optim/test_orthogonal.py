"""A collective optimizer trains bitwise equally on any slices of matrices, and like plain PyTorch."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import partita
from partita import ConfigError
from tests.kit import seeds
from tests.kit.models import WIDTH, Stack, inputs, square_loss
from tests.kit.plans import ZERO
from tests.kit.ranks import on_ranks
from tests.kit.training import assert_close, assert_same_bits, train_engine, train_module, whole_weights, world
from tests.optim.orthogonal import Orthogonal, orthogonalize

LR, MOMENTUM, CLIP = 0.01, 0.9, 0.05
CONFIG: dict[str, Any] = {"clip_grad_norm": CLIP}


def orthogonal(params: Any) -> Orthogonal:
    return Orthogonal(params, lr=LR, momentum=MOMENTUM)


def by_singular_values(matrix: Tensor) -> Tensor:
    """Return the same orthogonalization, computed on the singular values of the matrix in fp64."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s @ v * 0.2 * math.sqrt(max(matrix.shape))).to(matrix)


class Plain(Optimizer):
    """The same optimizer on full parameters, with orthogonalization by singular values."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                momentum.mul_(MOMENTUM).add_(param.grad)
                param.sub_(LR * (by_singular_values(momentum) if param.dim() == 2 else momentum))


def wide() -> nn.Module:
    """Return a model with matrices large enough to be sharded: shards begin at multiples of 256 elements."""
    return nn.Sequential(nn.Linear(WIDTH, 48), nn.Tanh(), nn.Linear(48, 80), nn.Tanh(), nn.Linear(80, WIDTH))


class Uneven(nn.Module):
    """A model with units whose matrix lies on a single rank, and with an unused unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList([nn.Linear(3, 3, bias=False) for _ in range(2)])
        self.tiny = nn.Linear(3, 1)
        self.unused = nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.tiny(x)


MODELS = {
    "wide": wide,
    "uneven": Uneven,
    "one rank has all": lambda: nn.Linear(WIDTH, 1, bias=False),
}


def stages_train_alike(model: str) -> None:
    results = {}
    for name, zero in ZERO.items():
        seeds.start()
        with partita.initialize(MODELS[model](), {**CONFIG, "zero": zero}, optimizer=orthogonal) as engine:
            assert isinstance(engine.optimizer, Orthogonal)
            if model == "wide" and name != "0":
                held = [param.numel() for group in engine.optimizer.param_groups for param in group["params"]]
                sizes = {param.numel() for param in wide().parameters()}
                assert any(size not in sizes for size in held), "this rank has no slice of a matrix"
            results[name] = train_engine(engine, square_loss, 4)
    for name, result in results.items():
        assert_same_bits(result, results["0"], f"stage {name}")
    seeds.start()
    plain = train_module(
        MODELS[model](), square_loss, 4, num_data=world(), own=torch.distributed.get_rank(), optimizer=Plain, clip=CLIP
    )
    assert all(norm is not None and norm > CLIP for norm in plain.norms), "nothing is clipped"
    assert_close(results["0"], plain)


@pytest.mark.parametrize("model", MODELS)
def test_stages_train_alike(model: str) -> None:
    on_ranks(2, stages_train_alike, model)


def resumes(folder: Path) -> None:
    """Check that a checkpoint of stage 3, loaded at stage 0, continues like the run that saved it."""

    def engine_at(stage: int) -> partita.Engine:
        seeds.start()
        return partita.initialize(wide(), {**CONFIG, "zero": {"stage": stage}}, optimizer=orthogonal)

    def trained(engine: partita.Engine, *numbers: int) -> dict[str, Tensor]:
        for step in numbers:
            engine.backward(square_loss(engine, torch.distributed.get_rank(), step))
            engine.step()
        return whole_weights(engine)

    with engine_at(3) as engine:
        trained(engine, 0, 1)
        engine.save(folder)
        expected = trained(engine, 2, 3)
    with engine_at(0) as engine:
        engine.load(folder)
        found = trained(engine, 2, 3)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_resumes_at_another_stage(tmp_path: Path) -> None:
    on_ranks(2, resumes, tmp_path)


def half_precision_trains_alike() -> None:
    results = []
    for stage in (0, 1, 3):
        seeds.start()
        config = {**CONFIG, "zero": {"stage": stage}, "precision": {"compute": "bf16"}}
        with partita.initialize(wide(), config, optimizer=orthogonal) as engine:
            results.append(train_engine(engine, square_loss, 3))
    for result in results[1:]:
        assert_same_bits(result, results[0])


def test_half_precision_trains_alike() -> None:
    on_ranks(2, half_precision_trains_alike)


def refuses_states_elsewhere() -> None:
    model = wide()
    optimizer = Orthogonal(model.parameters(), lr=LR)
    with pytest.raises(ConfigError, match=r"gathers matrices at the step, on the device.*set zero.offload.optimizer"):
        partita.initialize(model, {"zero": {"stage": 1, "offload": {"optimizer": "host"}}}, optimizer=optimizer)
    model(inputs(0, 0))  # the refused model still runs without an engine


def test_refuses_states_elsewhere() -> None:
    on_ranks(2, refuses_states_elsewhere)


def refuses_parts_of_matrices() -> None:
    with pytest.raises(ConfigError, match="needs all of each matrix.*set parallel.tensor to 1"):
        partita.initialize(Stack(1), {**CONFIG, "parallel": {"tensor": 2}}, optimizer=orthogonal)


def test_refuses_parts_of_matrices() -> None:
    on_ranks(2, refuses_parts_of_matrices)


@pytest.mark.parametrize("shape", [(7, 7), (24, 8), (8, 24), (1, 5)])
def test_singular_values(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(orthogonalize(matrix), by_singular_values(matrix), rtol=1e-4, atol=1e-4)


def test_zero_matrix_has_no_update() -> None:
    assert not orthogonalize(torch.zeros(4, 3)).any()


def test_vectors_have_sgd() -> None:
    one, other = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    for optimizer in (Orthogonal([one], lr=LR, momentum=MOMENTUM), SGD([other], lr=LR, momentum=MOMENTUM)):
        for _ in range(3):
            (param,) = optimizer.param_groups[0]["params"]
            param.grad = param.detach().clone()
            optimizer.step()
    torch.testing.assert_close(one, other)
