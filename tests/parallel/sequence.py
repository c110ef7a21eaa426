"""What runs on the ranks for ``test_sequence``: models on slices, beside the same model whole in the same process."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from partita.comm.collectives import Collectives
from partita.comm.group import Group
from partita.comm.mesh import Mesh
from partita.comm.world import Rendezvous
from partita.parallel.applied import Changes
from partita.parallel.sequence.apply import SequenceParallel
from partita.plan.mesh_shape import MeshShape
from partita.train.decoder import Decoder, DecoderShape
from tests import seeds
from tests.local.training import rank, world
from tests.parallel import zoo
from tests.parallel.zoo import VOCAB, WIDTH, Batch

LENGTH = 23
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "use_cache": False,
}
# Gathering sends less; fewer heads than ranks; capped scores, which transformers computes eagerly, and windows.
OWN = {
    "llama-one-key-head": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, num_key_value_heads=1)),
    "decoder-two-heads": lambda: Decoder(DecoderShape(2, WIDTH, 2, 2, 64, VOCAB)),
    "gemma2-eager": lambda: Gemma2ForCausalLM(
        Gemma2Config(**_SIZES, num_key_value_heads=2, head_dim=8, sliding_window=8, attn_implementation="eager")
    ),
}
NAMES = ("llama", "qwen3", "qwen3moe", "gpt2", "neox", "phi3", "olmo2", "bert", "vit", "decoder", *OWN)


def built(name: str) -> nn.Module:
    seeds.start()
    model: nn.Module = OWN[name]() if name in OWN else zoo.build(name)
    if name == "bert":  # transformers reads what its loss is from the names of classes in its own files
        model.loss_type = "ForMaskedLM"
    return model


def batch_of(name: str, step: int = 0, *, samples: int = 2, length: int = LENGTH) -> Batch:
    """Every second batch is padded, the first sample on the left and the last on the right; some labels are ignored."""
    random = seeds.generator(step)
    if name == "vit":
        return zoo.batch(name, step, samples)
    tokens = torch.randint(3, VOCAB, (samples, length + 1), generator=random)
    if name.startswith("decoder"):
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    tokens, mask = tokens[:, 1:], torch.ones(samples, length, dtype=torch.long)
    if step % 2:
        mask[0, :3], mask[-1, length - 5 :] = 0, 0
    labels = tokens.masked_fill(mask == 0, -100)
    labels[0, 7] = -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


@contextmanager
def connected() -> Iterator[Collectives]:
    """All ranks along the sequence axis."""
    mesh = Mesh(MeshShape(sequence=world()), torch.device("cpu"), Rendezvous(rank(), world(), 60.0))
    try:
        collectives = Collectives(mesh)
        collectives.open([("sequence",)])
        yield collectives
    finally:
        mesh.close()


@contextmanager
def on_slices(model: nn.Module, collectives: Collectives) -> Iterator[SequenceParallel]:
    changes = Changes()
    try:
        yield SequenceParallel(model, collectives.mesh, collectives.group(("sequence",)), changes)
    finally:
        changes.undo()


@dataclass
class Beside:
    """How far a model on slices is from the whole one: the loss, and of all gradients the largest difference, as a share
    of its parameter's largest; of which one.
    """

    loss: float = 0.0
    gradient: float = 0.0
    name: str = ""


def beside_whole(name: str) -> Beside:
    """Two batches of 23 positions, and one of 14."""
    found, whole = Beside(), built(name)
    model = copy.deepcopy(whole)
    with connected() as collectives, on_slices(model, collectives):
        for step, length in enumerate((LENGTH, LENGTH, 14)):
            batch = batch_of(name, step, length=length)
            expected, loss = zoo.loss_of(whole(**batch)), zoo.loss_of(model(**batch))
            expected.backward()
            loss.backward()
            found.loss = max(found.loss, abs(loss.item() - expected.item()))
            for (fqn, wanted), param in zip(whole.named_parameters(), model.parameters(), strict=True):
                gradient = mean_gradient(param, collectives.group(("sequence",)))
                reference = torch.zeros_like(wanted) if wanted.grad is None else wanted.grad
                off = float((gradient - reference).abs().max() / reference.abs().max().clamp_min(1e-3))
                if off > found.gradient:
                    found.gradient, found.name = off, fqn
            whole.zero_grad()
            model.zero_grad()
    return found


def mean_gradient(param: nn.Parameter, group: Group) -> Tensor:
    """What the engine makes of the ranks' gradients."""
    gradient = torch.zeros_like(param) if param.grad is None else param.grad
    return group.sum(gradient, "test") / group.size
