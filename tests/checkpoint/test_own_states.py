"""States of any optimizer are saved and loaded at every stage, whatever their form and dtype."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import partita
from partita import PartitaError
from partita.checkpoint.format.stored import open_stored
from partita.checkpoint.offline import verify
from tests.kit import seeds
from tests.kit.models import WIDTH, Stack, square_loss
from tests.kit.plans import TIERS, ZERO, matrix
from tests.kit.ranks import on_ranks
from tests.kit.training import rank, whole_weights

Params = Iterable[Any]


class Own(Optimizer):
    """Base class of the optimizers below: ``p -= lr * change(g)``, with the state of each parameter."""

    def __init__(self, params: Params, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self.change(param.grad, self.state[param]), alpha=group["lr"])

    def change(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class Counting(Own):
    """Gradients divided by the number of updates, the only state."""

    def change(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        state["count"] = state.get("count", 0) + 1
        return grad / state["count"]


class Listing(Own):
    """Gradients divided by the number of updates; the only state is a list, which changes in place."""

    def change(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        state.setdefault("updates", []).append("an update")
        return grad / len(state["updates"])


class Rounded(Own):
    """Momentum in bf16."""

    def change(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state["momentum"] = torch.zeros_like(grad, dtype=torch.bfloat16)
        momentum: Tensor = state["momentum"]
        return momentum.mul_(0.9).add_(grad.bfloat16()).to(grad.dtype)


class Shampoo(Own):
    """One preconditioner for each dimension (Gupta et al., 2018, with inverses in place of their roots)."""

    def change(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state["step"] = 0
            state["preconditioners"] = [torch.eye(size) for size in grad.shape]
        state["step"] += 1
        for dim, preconditioner in enumerate(state["preconditioners"]):
            moved = grad.movedim(dim, 0)
            rows = moved.reshape(len(moved), -1)
            preconditioner.add_(rows @ rows.T)
            grad = torch.linalg.solve(preconditioner, rows).view(moved.shape).movedim(0, dim)
        return grad / state["step"]


class Keyed(Own):
    """Momentum in a dictionary whose keys cannot be written as text."""

    def change(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        momentum: Tensor = state.setdefault("momentum", {grad.dtype: torch.zeros_like(grad)})[grad.dtype]
        return momentum.mul_(0.9).add_(grad)


def aggregated(params: Params) -> Optimizer:
    from pytorch_optimizer import AggMo

    return AggMo(params, lr=1e-2)


def adafactor(params: Params) -> Optimizer:
    return torch.optim.Adafactor(params, lr=1e-2)


def lamb(params: Params) -> Optimizer:
    from pytorch_optimizer import Lamb

    return Lamb(params, lr=1e-2)


class WithScalars(nn.Module):
    """Two matrices and two scalars."""

    class Affine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale + self.shift

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.affine = self.Affine()

    def forward(self, x: Tensor) -> Tensor:
        return self.affine(self.last(torch.tanh(self.first(x))))


KINDS: dict[str, Callable[[Params], Optimizer]] = {
    "aggregated": aggregated,
    "counting": Counting,
    "listing": Listing,
    "rounded": Rounded,
    "shampoo": Shampoo,
    "adafactor": adafactor,
    "lamb": lamb,
}
PLANS = {**ZERO, **TIERS}


def train(engine: partita.Engine, first: int, num_steps: int) -> list[float]:
    losses = []
    for step in range(first, first + num_steps):
        loss = square_loss(engine, rank(), step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def states_of(engine: partita.Engine) -> dict[str, Tensor]:
    names = [name for name, _ in engine.module.named_parameters()]
    return {f"{name}.{key}": value for name in names for key, value in engine.optimizer_state(name).items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether two dictionaries have the same bits in the same dtypes."""
    equal = (other[name].dtype == value.dtype and torch.equal(other[name], value) for name, value in one.items())
    return one.keys() == other.keys() and all(equal)


def resumes(folder: Path, kind: str, plan: str, model: Callable[[], nn.Module], num_states: int) -> None:
    """Save twice, and train on; a run that loads the second checkpoint has the same states, losses and weights."""

    def engine() -> partita.Engine:
        seeds.start()
        return partita.initialize(model(), {"zero": PLANS[plan]}, optimizer=KINDS[kind])

    with engine() as first:
        train(first, 0, 1)
        first.save(folder)
        train(first, 1, 2)
        path = first.save(folder)
        states = states_of(first)
        expected = train(first, 3, 3), whole_weights(first)
    assert len(states) == num_states
    if rank() == 0:
        assert list(verify(open_stored(path))) == []
    with engine() as second:
        train(second, 7, 1)
        restored = second.load(path)
        assert (restored.missing, restored.unexpected) == ((), ())
        assert same(states, states_of(second))
        losses, weights = train(second, 3, 3), whole_weights(second)
        assert losses == expected[0]
        assert same(expected[1], weights)


# The numbers of states that are tensors or numbers: a Stack(1) has 4 matrices and 6 vectors.
NUM_STATES = {"aggregated": 3 * 10, "counting": 10, "listing": 0, "rounded": 10, "shampoo": 10 + 4 * 2 + 6}


@matrix(ranks=[1, 2], plan=["0", "1", "3"], kind=NUM_STATES)
def test_states_in_any_form(ranks: int, plan: str, kind: str, tmp_path: Path) -> None:
    on_ranks(ranks, resumes, tmp_path, kind, plan, stack, NUM_STATES[kind])


@pytest.mark.parametrize("kind", ["aggregated", "counting", "listing", "rounded"])
@pytest.mark.parametrize("plan", ["3-host", "3-disk"])
def test_states_in_any_form_in_other_tiers(kind: str, plan: str, tmp_path: Path) -> None:
    on_ranks(2, resumes, tmp_path, kind, plan, stack, NUM_STATES[kind])


def stack() -> Stack:
    return Stack(1)


# Adafactor: a counter, and two means of a matrix or one of a scalar; LAMB: two moments and three norms.
@pytest.mark.parametrize(("kind", "num_states"), [("adafactor", 2 * 3 + 2 * 2), ("lamb", 4 * 5)])
@pytest.mark.parametrize("plan", ["1", "3"])
def test_scalars_at_their_owners(kind: str, num_states: int, plan: str, tmp_path: Path) -> None:
    on_ranks(2, resumes, tmp_path, kind, plan, WithScalars, num_states)


def keys_that_are_no_text(folder: Path) -> None:
    for stage in (0, 3):
        with partita.initialize(Stack(1), {"zero": {"stage": stage}}, optimizer=Keyed) as engine:
            train(engine, 0, 1)
            if stage == 0:
                engine.save(folder)
                continue
            message = (
                r"the optimizer's state 'momentum' of '.*' is a dict with tensors for a slice of the parameter: "
                "expected tensors, or lists, tuples and dictionaries of them, whose keys are numbers or text"
            )
            with pytest.raises(PartitaError, match=message):
                engine.save(folder)


def test_a_dictionary_that_cannot_be_saved_from_slices_is_refused(tmp_path: Path) -> None:
    on_ranks(2, keys_that_are_no_text, tmp_path)


def states_that_both_have(folder: Path, moments: str, name: str) -> set[str]:
    """Load a checkpoint of adam into a run with another optimizer; return the names of its states."""
    config = {"optimizer": {"name": "adam"}, "precision": {"moments": moments}}
    with partita.initialize(Stack(1), config) as engine:
        train(engine, 0, 2)
        engine.save(folder)
        expected = engine.optimizer_state("first.weight")["exp_avg"]
    with partita.initialize(Stack(1), {"optimizer": {"name": name}}) as engine:
        engine.load(folder)
        found = engine.optimizer_state("first.weight")
        assert torch.equal(found["exp_avg"], expected)
        return set(found)


@pytest.mark.filterwarnings(
    "ignore:.* was saved with the optimizer adam:UserWarning", "ignore:.* is configured differently:UserWarning"
)
@pytest.mark.parametrize("moments", ["fp32", "int8"])
@pytest.mark.parametrize(
    ("name", "expected"), [("lion", {"step", "exp_avg"}), ("adamw", {"step", "exp_avg", "exp_avg_sq"})]
)
def test_only_the_states_that_both_optimizers_have_are_loaded(
    moments: str, name: str, expected: set[str], tmp_path: Path
) -> None:
    assert on_ranks(2, states_that_both_have, tmp_path, moments, name) == [expected] * 2
