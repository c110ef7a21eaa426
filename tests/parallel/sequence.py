"""Models, batches and runs of the tests of sequence parallelism."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partita.comm.collectives import Collectives
from partita.comm.group import Group
from partita.comm.mesh import Mesh
from partita.comm.world import Rendezvous
from partita.parallel.sequence.apply import SequenceParallel
from partita.plan.mesh_shape import MeshShape
from tests import seeds

VOCAB, LENGTH = 64, 23
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 32,
}
Batch = dict[str, Tensor]


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))


def one_key_head() -> nn.Module:
    """For which gathering sends less."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1))


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8))


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_key_value_heads=2, head_dim=8, **experts))


def gemma2() -> nn.Module:
    """Sliding windows in every second layer; scores and logits capped, which transformers computes eagerly."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=8, attn_implementation="eager")
    return Gemma2ForCausalLM(config)


def gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=48, n_layer=2, n_head=6, **rates))
    model.loss_type = "ForCausalLM"
    return model


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    model.loss_type = "ForMaskedLM"
    return model


def vit() -> nn.Module:
    """1 + 16 positions."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {key: value for key, value in SIZES.items() if key not in ("vocab_size", "max_position_embeddings")}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=5))


def decoder() -> nn.Module:
    from partita.train.decoder import Decoder, DecoderShape

    return Decoder(DecoderShape(layers=2, width=48, heads=6, kv_heads=2, ffn_width=64, vocab=VOCAB))


def wide_decoder() -> nn.Module:
    """More ranks than heads."""
    from partita.train.decoder import Decoder, DecoderShape

    return Decoder(DecoderShape(layers=2, width=48, heads=2, kv_heads=2, ffn_width=64, vocab=VOCAB))


MODELS: dict[str, Callable[[], nn.Module]] = {
    make.__name__: make
    for make in (llama, one_key_head, qwen3, qwen3_moe, gemma2, gpt2, bert, vit, decoder, wide_decoder)
}


def batch_of(name: str, step: int = 0, *, samples: int = 2, length: int = LENGTH) -> Batch:
    """Padded on the right and with ignored labels where the model is told of padding."""
    random = seeds.generator(step)
    if name == "vit":
        pixels = torch.randn(samples, 3, 16, 16, generator=random)
        return {"pixel_values": pixels, "labels": torch.randint(5, (samples,), generator=random)}
    tokens = torch.randint(VOCAB, (samples, length + 1), generator=random)
    if name.endswith("decoder"):
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    tokens, mask = tokens[:, 1:], torch.ones(samples, length, dtype=torch.long)
    mask[-1, length - 5 :] = step % 2  # every second batch is padded
    labels = tokens.masked_fill(mask == 0, -100)
    labels[0, 1] = -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def loss_of(output: Any) -> Tensor:
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss


def built(name: str) -> nn.Module:
    seeds.start()
    return MODELS[name]()


def sequence_group() -> tuple[Mesh, Group, Collectives]:
    """Of all ranks that run."""
    shape = MeshShape(sequence=dist.get_world_size())
    mesh = Mesh(shape, torch.device("cpu"), Rendezvous(dist.get_rank(), shape.num_ranks, 60.0, 0, "auto", None))
    collectives = Collectives(mesh)
    collectives.open([("sequence",)])
    return mesh, collectives.group(("sequence",)), collectives


def both_ways(name: str, *, train: bool = True) -> tuple[float, float, str]:
    """How far loss and gradients (relative to the parameter's largest) are from one process's, and of which one."""
    reference = built(name).train(train)
    model = copy.deepcopy(reference)
    mesh, group, _ = sequence_group()
    parallel = SequenceParallel(model, group)
    off, worst, where = 0.0, 0.0, ""
    try:
        for step, length in enumerate((LENGTH, LENGTH, 14)):
            batch = batch_of(name, step, length=length)
            expected, loss = loss_of(reference(**batch)), loss_of(model(**batch))
            expected.backward()
            loss.backward()
            off = max(off, abs(loss.item() - expected.item()))
            for (fqn, wanted), param in zip(reference.named_parameters(), model.parameters(), strict=True):
                gradient = torch.zeros_like(param) if param.grad is None else param.grad
                dist.all_reduce(gradient)
                if wanted.grad is None:
                    assert not gradient.any(), fqn
                    continue
                gradient /= group.size
                error = float((gradient - wanted.grad).abs().max() / wanted.grad.abs().max().clamp_min(1e-3))
                if error > worst:
                    worst, where = error, fqn
            reference.zero_grad()
            model.zero_grad()
    finally:
        parallel.remove()
        mesh.close()
    return off, worst, where
