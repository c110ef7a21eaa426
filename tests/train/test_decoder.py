"""Properties of the decoder: causality, relative positions, grouped queries, initial loss."""

import math

import pytest
import torch
import torch.nn.functional as F

from partita.train.decoder import Attention, Decoder, DecoderShape, rotary_table, rotate
from tests.kit import seeds

SHAPE = DecoderShape(layers=2, width=32, heads=4, kv_heads=2, ffn_width=48)


def decoder(shape: DecoderShape = SHAPE, seed: int = 0) -> Decoder:
    seeds.start(seed)
    return Decoder(shape)


def some_tokens(*size: int) -> torch.Tensor:
    return torch.randint(256, size, generator=seeds.generator(1))


def test_targets_give_the_mean_cross_entropy_of_the_logits() -> None:
    model, tokens = decoder(), some_tokens(3, 11)
    logits = model(tokens[:, :-1])
    assert logits.shape == (3, 10, 256)
    expected = F.cross_entropy(logits.reshape(-1, 256), tokens[:, 1:].reshape(-1))
    torch.testing.assert_close(model(tokens[:, :-1], tokens[:, 1:]), expected)


def test_the_initial_loss_is_that_of_a_guess() -> None:
    loss = decoder()(some_tokens(4, 64), some_tokens(4, 64).flip(0))
    assert loss.item() == pytest.approx(math.log(256), abs=0.35)


def test_no_token_sees_a_later_one() -> None:
    model, tokens = decoder(), some_tokens(1, 12)
    other = tokens.clone()
    other[0, 7] = (other[0, 7] + 1) % 256
    before, after = model(tokens), model(other)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_positions_are_relative() -> None:
    table = rotary_table(20, 16, torch.device("cpu"))
    generator = seeds.generator()
    query, key = (torch.randn(16, generator=generator).expand(1, 1, 20, 16) for _ in range(2))
    scores = rotate(query, table) @ rotate(key, table).transpose(-1, -2)
    for distance in range(-5, 6):
        diagonal = scores[0, 0].diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    others = torch.stack([scores[0, 0, 5, 5 - distance] for distance in range(1, 6)])
    assert (others - scores[0, 0, 5, 5]).abs().max() > 1e-3  # one of them may be equal by chance


def test_grouped_queries_are_full_attention_with_shared_keys() -> None:
    grouped = Attention(SHAPE)
    full = Attention(DecoderShape(layers=2, width=32, heads=4, kv_heads=4, ffn_width=48))
    queries, keys, values = grouped.qkv.weight.detach().view(8, 8, 32).split([4, 2, 2])
    shared = torch.cat((queries, keys.repeat_interleave(2, 0), values.repeat_interleave(2, 0)))
    full.load_state_dict({"qkv.weight": shared.reshape(96, 32), "out.weight": grouped.out.weight.detach()})
    x = torch.randn(2, 9, 32, generator=seeds.generator())
    table = rotary_table(9, 8, x.device)
    torch.testing.assert_close(grouped(x, table), full(x, table))


def test_seed_decides_the_weights() -> None:
    first, same, other = decoder(seed=3), decoder(seed=3), decoder(seed=4)
    for a, b in zip(first.parameters(), same.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def test_projections_into_the_residual_stream_start_smaller() -> None:
    block = decoder(DecoderShape(layers=8, width=128, heads=4, kv_heads=4, ffn_width=256)).blocks[0]
    small, usual = block.ffn.down.weight.std().item(), block.ffn.up.weight.std().item()
    assert small / usual == pytest.approx(1 / math.sqrt(2 * 8), rel=0.05)


def test_tied_decoder_has_one_matrix() -> None:
    shape = DecoderShape(layers=1, width=32, heads=4, kv_heads=4, ffn_width=48, tied=True)
    model = decoder(shape)
    assert model.head.weight is model.embedding.weight
    assert sum(p.numel() for p in model.parameters()) == 256 * 32 + 32 + (2 * 32 + 4 * 32 * 32 + 3 * 32 * 48)


def test_a_decoder_on_meta_is_filled_by_its_modules() -> None:
    with torch.device("meta"):
        model = Decoder(SHAPE)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    seeds.start()
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.reset_parameters()
    loss = model(some_tokens(2, 8), some_tokens(2, 8))
    assert loss.item() == pytest.approx(math.log(256), abs=0.8)


def test_every_parameter_has_a_gradient() -> None:
    model = decoder()
    model(some_tokens(2, 8), some_tokens(2, 8)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
