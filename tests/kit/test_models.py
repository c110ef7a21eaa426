"""Tests of the kit's models: small, seeded, without dropout, and a batch's loss is the mean of its parts' losses."""

import math

import pytest
import torch
from torch import Tensor, nn

from tests.kit.models import CASES, LENGTH, NUM_CLASSES, NUM_MASKED, VOCAB, Case, parts

each = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def loss_and_gradients(case: Case, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = case.loss(model(**batch))
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@each
def test_small_and_seeded(case: Case) -> None:
    state = torch.get_rng_state()
    first, again, other = case.build(), case.build(), case.build(seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert 10_000 < sum(p.numel() for p in first.parameters()) < 1_000_000
    pairs = list(zip(first.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(p, q) for p, q in pairs)
    assert any(not torch.equal(p, q) for p, q in zip(first.parameters(), other.parameters(), strict=True))
    assert first.training


@each
def test_batches_are_seeded(case: Case) -> None:
    first, again, other = (next(case.batches(4, seed)) for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    assert all(len(value) == 4 for value in first.values())


@each
def test_loss_begins_as_that_of_a_guess_and_every_parameter_gets_a_gradient(case: Case) -> None:
    model = case.build()
    loss, gradients = loss_and_gradients(case, model, next(case.batches(8)))
    guess = math.log(NUM_CLASSES if case.name == "resnet" else VOCAB)
    assert abs(loss.item() - guess) < 0.5
    assert gradients.keys() == dict(model.named_parameters()).keys()
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients.values())


@pytest.mark.thorough
@each
def test_same_gradients_each_time(case: Case) -> None:
    model, batch = case.build(), next(case.batches(4))
    first, again = (loss_and_gradients(case, model, batch) for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert all(torch.equal(first[1][name], again[1][name]) for name in first[1])


@each
def test_loss_and_gradients_are_the_mean_of_the_parts(case: Case) -> None:
    model = case.build()
    if case.mixes_samples:
        model.eval()
    batch = next(case.batches(8))
    loss, gradients = loss_and_gradients(case, model, batch)
    partial = [loss_and_gradients(case, model, part) for part in parts(batch, 4)]
    torch.testing.assert_close(loss, torch.stack([part_loss for part_loss, _ in partial]).mean(), rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        mean = torch.stack([part[name] for _, part in partial]).mean(0)
        torch.testing.assert_close(mean, gradient, rtol=0, atol=1e-5 * gradient.abs().max().item(), msg=name)


def test_only_batch_normalization_mixes_samples() -> None:
    mixing = [
        name for name, case in CASES.items() if any(isinstance(m, nn.BatchNorm2d) for m in case.build().modules())
    ]
    assert mixing == [name for name, case in CASES.items() if case.mixes_samples]


@pytest.mark.thorough
@each
def test_half_precision(case: Case) -> None:
    model = case.build().bfloat16()
    batch = {name: v.bfloat16() if v.is_floating_point() else v for name, v in next(case.batches(4)).items()}
    loss, _ = loss_and_gradients(case, model, batch)
    assert loss.isfinite()


@each
def test_builds_on_meta(case: Case) -> None:
    assert all(p.is_meta for p in case.build(device="meta").parameters())


def test_masked_batch_has_as_many_targets_in_each_sample() -> None:
    batch = next(CASES["bert"].batches(16))
    masked = batch["labels"] != -100
    assert masked.sum(1).tolist() == [NUM_MASKED] * 16
    assert torch.equal(batch["input_ids"] == 0, masked)
    assert masked.shape == (16, LENGTH)


def test_tied_weights_are_tied() -> None:
    gpt2 = CASES["gpt2"].build()
    assert gpt2.get_parameter("lm_head.weight") is gpt2.get_parameter("transformer.wte.weight")
