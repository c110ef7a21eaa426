"""torch.compile of blocks, in place, and of the full model, at every stage: losses as in eager mode, no recompiles."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import partita
from tests.kit import seeds
from tests.kit.models import Stack, inputs, square_loss
from tests.kit.plans import ZERO, sampled
from tests.kit.ranks import on_ranks
from tests.kit.state import assert_idle
from tests.kit.training import ADAMW, rank, small_buckets, whole_weights

# torch's compiler reads .grad of a graph's inputs, for which torch warns.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

WARM_UP, NUM_STEPS = 2, 5


class Checkpointed(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.last(x)


def replace_blocks(model: Any, backend: Any) -> Any:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend=backend)
    return model


def compile_blocks(model: Any, backend: Any) -> Any:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def compile_in_place(model: Any, backend: Any) -> Any:
    model.compile(backend=backend)
    return model


def compile_whole(model: Any, backend: Any) -> Any:
    return torch.compile(model, backend=backend)


HOW: dict[str, Callable[[Any, Any], Any]] = {
    "block.compile()": compile_blocks,
    "blocks replaced": replace_blocks,
    "model.compile()": compile_in_place,
    "torch.compile(model)": compile_whole,
}


def steps(engine: partita.Engine) -> list[float]:
    """Train, and return the losses. Recompilation after the second step is an error."""
    losses = []
    for step in range(NUM_STEPS):
        with torch._dynamo.config.patch(error_on_recompile=step >= WARM_UP):
            loss = square_loss(engine, rank(), step)
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
        assert_idle(engine)
    return losses


def train(zero: dict[str, Any], prepare: Callable[[Any], Any], later: Callable[[Any], Any]) -> tuple[list[float], Any]:
    """Return losses and weights. ``prepare`` changes the model before initialize, ``later`` after it."""
    torch._dynamo.reset()
    seeds.start()
    with small_buckets(), partita.initialize(prepare(Stack(3)), {"zero": zero, "optimizer": ADAMW}) as engine:
        later(engine.module)
        losses = steps(engine)
        weights = whole_weights(engine)
    return losses, {name.replace("_orig_mod.", ""): value for name, value in weights.items()}


def compiled(how: str, after: bool, backend: str) -> int:
    """Compare compiled with eager training. Return the number of compiled graphs."""
    total = 0
    plans = ZERO if backend == "aot_eager" else {"3": ZERO["3"]}
    for name, zero in plans.items():
        losses, weights = train(zero, lambda model: model, lambda model: model)
        counter = CompileCounterWithBackend(backend)

        def change(model: Any, counter: Any = counter) -> Any:
            return HOW[how](model, counter)

        if after:
            got_losses, got_weights = train(zero, lambda model: model, change)
        else:
            got_losses, got_weights = train(zero, change, lambda model: model)
        assert counter.frame_count > 0, "something was compiled"
        total += counter.frame_count
        assert_close(got_losses, got_weights, losses, weights, name, exact=backend == "aot_eager")
    return total


def assert_close(got: list[float], got_weights: Any, losses: list[float], weights: Any, name: str, exact: bool) -> None:
    if exact:
        assert got == losses, f"plan {name}: {got}, {losses}"
        assert all(torch.equal(value, weights[key]) for key, value in got_weights.items()), f"plan {name}"
    else:
        torch.testing.assert_close(got, losses, rtol=1e-4, atol=0)


def by_inductor() -> None:
    # Without compiler processes, which would outlive the test, and without precompiled headers for one test.
    with torch._inductor.config.patch(compile_threads=1, cpp_cache_precompile_headers=False):
        compiled("block.compile()", True, "inductor")


def checkpointed() -> None:
    """Check that compiled blocks inside torch's checkpoint train as eager ones."""
    for name, zero in ZERO.items():
        results = []
        for backend in (None, "aot_eager"):
            torch._dynamo.reset()
            seeds.start()
            with partita.initialize(Checkpointed(3), {"zero": zero, "optimizer": ADAMW}) as engine:
                if backend:
                    compile_blocks(engine.module, backend)
                results.append(steps(engine))
        assert results[0] == results[1], f"plan {name}"


def recomputed(choice: str) -> None:
    """Check that compiled blocks that the engine recomputes in backward train as those that it does not."""
    for zero in (ZERO["0"], ZERO["3"]):
        results = []
        for keep in ("none", choice):
            torch._dynamo.reset()
            seeds.start()
            config = {"zero": zero, "optimizer": ADAMW, "activations": {"checkpoint": keep}}
            with partita.initialize(Stack(3), config) as engine:
                compile_blocks(engine.module, "aot_eager")
                results.append(steps(engine))
        assert results[0] == results[1], zero


def train_and_evaluate() -> None:
    """Check that switching between training and evaluation compiles each only once."""
    torch._dynamo.reset()
    with partita.initialize(Stack(3), {"zero": {"stage": 3}}) as engine:
        compile_blocks(engine.module, "aot_eager")
        for step in range(4):
            with torch._dynamo.config.patch(error_on_recompile=step >= WARM_UP):
                engine.train()
                engine.backward(square_loss(engine, rank(), step))
                engine.step()
                engine.eval()
                with torch.no_grad():
                    engine(inputs(rank(), step))


# torch.compile(model) returns another module, which must be passed to initialize.
WHEN = [(how, after) for how in HOW for after in (True, False) if not (after and how == "torch.compile(model)")]


SAMPLE = (("block.compile()", False), ("blocks replaced", True), ("torch.compile(model)", False))


@pytest.mark.parametrize(("how", "after"), sampled(WHEN, *SAMPLE))
def test_compiled_as_eager(how: str, after: bool) -> None:
    on_ranks(2, compiled, how, after, "aot_eager", timeout=120)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_compiled_by_inductor() -> None:
    on_ranks(2, by_inductor, timeout=200)


def test_compiled_and_checkpointed() -> None:
    on_ranks(2, checkpointed, timeout=120)


@pytest.mark.parametrize("choice", ["units", "selective"])
def test_compiled_and_recomputed(choice: str) -> None:
    on_ranks(2, recomputed, choice, timeout=120)


def test_training_and_evaluation_compile_once_each() -> None:
    on_ranks(2, train_and_evaluate, timeout=120)
