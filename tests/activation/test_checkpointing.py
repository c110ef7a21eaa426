"""PyTorch's activation checkpointing, reentrant and not, at every stage: gradients are those of plain PyTorch."""

from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

from tests.kit.models import Stack, inputs, square_loss
from tests.kit.plans import ZERO, matrix, sampled
from tests.kit.ranks import on_ranks
from tests.kit.training import Recipe, check
from tests.sharding.test_visits import freeze, siamese


class Recomputed(Stack):
    """Stack whose blocks run ``times`` times each, and are recomputed in backward."""

    def __init__(self, reentrant: bool, times: int = 1) -> None:
        super().__init__()
        self.reentrant, self.times = reentrant, times

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            for _ in range(self.times):
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


class RecomputedPairs(Recomputed):
    """Stack with two blocks in each checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in range(0, 4, 2):

            def pair(x: Tensor, number: int = number) -> Tensor:
                return self.blocks[number + 1](self.blocks[number](x))

            x = checkpoint(pair, x, use_reentrant=self.reentrant)
        return self.last(self.blocks[4](x))


class RecomputedSequence(Recomputed):
    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint_sequential(list(self.blocks), 2, self.first(x), use_reentrant=self.reentrant)
        return self.last(x)


class RecomputedAll(Recomputed):
    """Stack with one checkpoint around everything, including the root's own layers, and one around each block in it."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.everything, x, use_reentrant=self.reentrant)

    def everything(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


def without_early_stop(model: Any, rank: int, step: int) -> Tensor:
    with set_checkpoint_early_stop(False):
        return square_loss(model, rank, step)


def from_leaf(model: Any, rank: int, step: int) -> Tensor:
    """Return the loss of inputs that require gradients; otherwise reentrant checkpointing computes no gradients."""
    return model(inputs(rank, step).requires_grad_()).square().mean()


def some_frozen(model: nn.Module) -> nn.Module:
    """Freeze blocks 0 and 3, and all of block 2 except the last bias."""
    return freeze(
        model, lambda name: not name.startswith(("blocks.0", "blocks.3", "blocks.2")) or name == "blocks.2.down.bias"
    )


MODELS = {
    "blocks": Recomputed,
    "pairs": RecomputedPairs,
    "sequence": RecomputedSequence,
    "all": RecomputedAll,
}
LOSSES = {"one": from_leaf, "two": siamese}


def run_model(name: str, reentrant: bool, plan: str) -> None:
    ignored = "None of the inputs have requires_grad" if name == "all" else ""  # torch's warning for nested checkpoints
    compared = {other: ZERO[other] for other in ("0", plan)}
    check(Recipe(lambda: MODELS[name](reentrant), from_leaf, ignored=ignored), compared)


def run_shared(reentrant: bool) -> None:
    check(Recipe(lambda: Recomputed(reentrant, times=2)))


def run_frozen(reentrant: bool) -> None:
    """Check recomputed blocks (frozen, partly frozen and trained), with two forwards before a backward."""
    check(Recipe(lambda: some_frozen(Recomputed(reentrant)), siamese))


def run_without_early_stop() -> None:
    check(Recipe(lambda: Recomputed(False), without_early_stop))


def recomputes_once() -> None:
    """Check that a reentrant block is unsharded for its recomputation, and stays unsharded for its backward."""
    import partita

    with partita.initialize(Recomputed(True), {"zero": {"stage": 3, "prefetch_bytes": 0}}) as engine:
        for step in range(2):
            before = engine.traffic_report()
            engine.backward(from_leaf(engine, 0, step))
            rows = engine.traffic_report().since(before).rows
            (calls,) = [row.calls for key, row in rows.items() if key.purpose == "parameters"]
            assert calls == 2 * 6, "each block and the root once in forward and once in backward"
            engine.step()


@matrix(name=MODELS, plan=("1", "2", "3", "3-kept"), reentrant=[False, True])
def test_checkpointed(name: str, reentrant: bool, plan: str) -> None:
    on_ranks(2, run_model, name, reentrant, plan)


@pytest.mark.parametrize("reentrant", sampled([False, True], True))
def test_shared_blocks(reentrant: bool) -> None:
    on_ranks(2, run_shared, reentrant)


@pytest.mark.parametrize("reentrant", sampled([False, True], False))
def test_frozen_blocks_and_two_forwards(reentrant: bool) -> None:
    on_ranks(2, run_frozen, reentrant)


def test_without_early_stop() -> None:
    on_ranks(2, run_without_early_stop)


def test_recomputed_block_is_gathered_once_in_backward() -> None:
    on_ranks(2, recomputes_once)
