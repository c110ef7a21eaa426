"""Split logits, read in ways of which PyTorch does not notify subclasses: full values, and correct gradients."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partita
from partita import PartitaError
from partita.sharding.deferred import Deferred
from tests.activation.readers import UNSEEN, own_loss
from tests.kit import seeds
from tests.kit.models import FAMILIES
from tests.kit.ranks import on_ranks

VOCAB, LENGTH = 30, 9
TILED = {"loss": {"tiled": 4 * VOCAB * 4}}
MESHES: dict[str, dict[str, Any]] = {
    "tensor": {"parallel": {"tensor": 2}},
    "sequence": {"parallel": {"sequence": 2}, "zero": {"stage": 3}},
    "tensor, in tiles": {"parallel": {"tensor": 2}, "zero": {"stage": 3}, **TILED},
    "sequence, in tiles": {"parallel": {"sequence": 2}, **TILED},
}
FOUR = {"parallel": {"tensor": 2, "sequence": 2}}


def llama() -> Any:
    seeds.start()
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return FAMILIES["llama"](vocab_size=VOCAB, use_cache=True, **shape)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(VOCAB, (2, LENGTH), generator=seeds.generator(0))
    return ids, ids.roll(-1, 1).masked_fill(ids % 5 == 0, -100)


def reads_all(config: dict[str, Any]) -> None:
    """Compare each loss and its gradients with plain PyTorch."""
    (ids, targets), model = batch(), llama()
    plain = copy.deepcopy(model)
    with partita.initialize(model, {**config, "precision": {"compute": "fp32"}}) as engine:
        for name, loss in UNSEEN.items():
            plain.zero_grad()
            engine.zero_grad()
            expected = loss(plain(input_ids=ids, use_cache=False).logits, targets)
            expected.backward()
            logits = engine(input_ids=ids, use_cache=False).logits
            assert isinstance(logits, Deferred)
            assert (logits.shape, logits.stride()) == ((2, LENGTH, VOCAB), (LENGTH * VOCAB, VOCAB, 1))
            found = loss(logits, targets)
            engine.backward(found)
            torch.testing.assert_close(found, expected, msg=name)
            for key, param in plain.named_parameters():
                assert param.grad is not None
                gradient = engine.gradient(key)
                assert gradient is not None, f"{name}: {key} has no gradient"
                largest = param.grad.abs().max().item()
                torch.testing.assert_close(gradient, param.grad, rtol=1e-5, atol=1e-5 * largest, msg=f"{name}: {key}")


@pytest.mark.filterwarnings("ignore:all logits of")
@pytest.mark.parametrize("mesh", MESHES)
def test_unannounced_readers(mesh: str) -> None:
    on_ranks(2, reads_all, MESHES[mesh], with_group=False)


def test_unannounced_readers_of_parts_of_slices() -> None:
    on_ranks(4, reads_all, FOUR, with_group=False)


CHANGES: dict[str, Any] = {
    "logits * scale": lambda logits, scale: logits * scale,
    "scale * logits": lambda logits, scale: scale * logits,
    "logits / scale": lambda logits, scale: logits / scale,
    "logits + scale": lambda logits, scale: (logits + scale).tanh(),
    "logits - scale": lambda logits, scale: torch.sub(logits, scale, alpha=2).tanh(),
    "logits.mul_(scale)": lambda logits, scale: logits.mul_(scale),
}


class Scaled(nn.Module):
    """Model that changes its logits by a learned number; ``computed``: by one that depends on the input."""

    def __init__(self, change: str, *, computed: bool) -> None:
        super().__init__()
        self.change = CHANGES[change]
        self.computed = computed
        self.embedding = nn.Embedding(VOCAB, 16)
        self.hidden, self.head = nn.Linear(16, 16), nn.Linear(16, VOCAB)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.hidden(self.embedding(ids))
        scale = self.scale * (1 + x.square().mean()) if self.computed else self.scale
        logits: torch.Tensor = self.change(self.head(x), scale)
        return logits


def scales() -> dict[tuple[str, bool], float]:
    """Return the largest relative error of a gradient under ``parallel.tensor``."""
    (ids, targets), found = batch(), dict[tuple[str, bool], float]()
    for change, computed in (*product(CHANGES, [False]), ("logits * scale", True)):
        seeds.start()
        model = Scaled(change, computed=computed)
        plain = copy.deepcopy(model)
        F.cross_entropy(plain(ids).flatten(0, 1), targets.flatten()).backward()
        errors = list[float]()
        with partita.initialize(model, MESHES["tensor"]) as engine:
            logits = engine(ids)
            assert isinstance(logits, Deferred)
            engine.backward(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
            for name, param in plain.named_parameters():
                gradient = engine.gradient(name)
                assert gradient is not None
                assert param.grad is not None
                errors.append(float((gradient - param.grad).abs().max() / param.grad.abs().max()))
        found[change, computed] = max(errors)
    return found


def test_numbers_that_scale_split_logits_get_gradients_of_all_classes() -> None:
    for found in on_ranks(2, scales, with_group=False):
        assert not {case: error for case, error in found.items() if error > 1e-5}


def refused(config: dict[str, Any]) -> None:
    ids, targets = batch()
    with partita.initialize(llama(), config) as engine:
        logits = engine(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        asked = "parallel.tensor_rules" if "tensor" in config["parallel"] else "parallel.sequence to 1"
        for call in (logits.retain_grad, lambda: torch.autograd.grad(loss, logits)):
            with pytest.raises(PartitaError, match=f"needs the gradient of deferred logits.* or set {asked}"):
                call()
        logits = engine(input_ids=ids, use_cache=False).logits
        logits.flatten(0, 1).mul_(2)
        loss = own_loss(logits, targets)
        with pytest.raises(PartitaError, match=r"changed in place by 'mul_'"):
            loss.backward()


@pytest.mark.parametrize("mesh", ["tensor", "sequence"])
def test_what_cannot_be_right_is_refused(mesh: str) -> None:
    on_ranks(2, refused, MESHES[mesh], with_group=False)


def means_of_large_losses(config: dict[str, Any]) -> None:
    """Check the mean of losses whose sum is out of fp16's range."""
    model = llama()
    model.lm_head.weight.data.mul_(500)
    ids = torch.randint(VOCAB, (128, 32), generator=seeds.generator(0))
    targets = ids.roll(-1, 1).masked_fill(ids % 5 == 0, -100)
    logits = copy.deepcopy(model)(input_ids=ids, use_cache=False).logits
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten()).detach()
    num_counted = int((targets != -100).sum())
    assert float(expected) * num_counted / 2 > torch.finfo(torch.float16).max, "a rank's own sum is in the range"
    precision = {"compute": "fp16", "mode": "cast", "outputs": "compute"}
    with partita.initialize(model, {**config, "precision": precision}) as engine:
        logits = engine(input_ids=ids, use_cache=False).logits
        assert isinstance(logits, Deferred)
        found = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        assert found.dtype == torch.float16
        torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.0)


IN_ONE_TILE = {"loss": {"tiled": 2**20}}


@pytest.mark.parametrize(
    "config",
    [{"parallel": {axis: 2}, **loss} for axis in ("tensor", "sequence") for loss in ({}, IN_ONE_TILE)],
    ids=str,
)
def test_means_of_large_losses_in_fp16(config: dict[str, Any]) -> None:
    on_ranks(2, means_of_large_losses, config, with_group=False)
