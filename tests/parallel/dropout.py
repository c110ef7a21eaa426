"""Rank functions of ``test_dropout``: models with dropout on tensor ranks, with random streams from one seed."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

import partita
from tests.kit import seeds
from tests.parallel import zoo

_P = 0.2
_GPT2 = {"n_embd": zoo.WIDTH, "n_layer": 2, "n_head": 6, "n_positions": 64, "vocab_size": zoo.VOCAB, "use_cache": False}
_T5 = {"vocab_size": zoo.VOCAB, "d_model": zoo.WIDTH, "d_kv": 8, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 2}


def build(name: str) -> nn.Module:
    """Return a model with six heads, in training mode. T5 also has dropout between its two feed-forward layers."""
    seeds.start()
    model: nn.Module
    if name == "t5":
        config = transformers.T5Config(
            **_T5, num_heads=6, dropout_rate=_P, decoder_start_token_id=0, attn_implementation="eager"
        )
        model = transformers.T5ForConditionalGeneration(config)
    else:
        shares = {"resid_pdrop": _P, "embd_pdrop": _P, "attn_pdrop": _P}
        config = transformers.GPT2Config(**_GPT2, **shares, attn_implementation=name.removeprefix("gpt2-"))
        model = transformers.GPT2LMHeadModel(config)
    return model.train()


def losses(name: str, parallel: dict[str, int], num_steps: int = 3) -> list[float]:
    config: dict[str, Any] = {"parallel": parallel, "seed": 7, "optimizer": {"lr": 1e-3, "eps": 1e-4}}
    found = []
    with partita.initialize(build(name), config) as engine:
        for step in range(num_steps):
            loss = engine(**zoo.batch("t5" if name == "t5" else "gpt2", step)).loss
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
    return found


def heads_of_kernel(attention: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the outputs of this rank's heads without and with dropout. All heads have the same weights."""
    model, seen = build("gpt2-sdpa"), list[Tensor]()
    first = model.transformer.h[0].attn
    with torch.no_grad():
        for part in (first.c_attn.weight, first.c_attn.bias):
            part.copy_(part.unflatten(-1, (3, 6, 8))[..., :1, :].expand(*part.shape[:-1], 3, 6, 8).flatten(-3))
    first.c_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    with partita.initialize(model, {"parallel": {"tensor": 2}, "seed": 7, "attention": attention}) as engine:
        for mode in (False, True):
            engine.train(mode)
            model.transformer.drop.eval()
            engine(**zoo.batch("gpt2", 0))
    return seen[0], seen[1]
