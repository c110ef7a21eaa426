"""Split logits, read in ways of which PyTorch does not notify subclasses: full values, and correct gradients."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

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
