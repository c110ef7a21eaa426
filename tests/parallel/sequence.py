"""Rank functions of ``test_sequence``: models on slices of the sequence, compared with models on full sequences."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

import partita
from partita.activation.recompute import Recomputation
from partita.comm.collectives import Collectives
from partita.comm.connections import Processes
from partita.comm.group import Group
from partita.comm.mesh import Mesh
from partita.comm.world import Rendezvous
from partita.memory.accelerator import HOST
from partita.parallel.block_outputs import BlockOutputs
from partita.parallel.sequence import attention, ring
from partita.parallel.sequence.apply import SequenceParallel
from partita.parallel.sequence.choose import ALL_TO_ALL, GATHER_KEYS, RING, Sizes
from partita.parallel.sequence.slices import Slices
from partita.table.mesh_shape import MeshShape
from partita.table.place import even
from partita.train.decoder import Block, Decoder, DecoderShape
from partita.transforms.modules import ModuleTransforms, Order
from tests.kit import seeds
from tests.kit.models import FAMILIES
from tests.kit.training import Loss, Trained, rank, train_engine, train_module, world
from tests.parallel import collecting, zoo
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
_T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 6,
    "dropout_rate": 0.0,
    "feed_forward_proj": "gated-gelu",  # smooth: at a ReLU's kink rounding turns a unit's gradient on or off
    "decoder_start_token_id": 0,
    "use_cache": False,
}
# On short sequences no expert gets more tokens than its capacity.
_SWITCH = {
    **{key: value for key, value in _T5.items() if key != "feed_forward_proj"},
    "num_experts": 2,
    "expert_capacity": 24,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
}
# Gathering keys sends less; fewer heads than ranks; encoder and decoder; soft-capped scores (eager) and windows.
OWN = {
    "llama-one-key-head": partial(FAMILIES["llama"], **_SIZES, num_key_value_heads=1),
    "decoder-two-heads": lambda: Decoder(DecoderShape(2, WIDTH, 2, 2, 64, VOCAB)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**_T5)),
    "t5-eager": lambda: T5ForConditionalGeneration(T5Config(**_T5, attn_implementation="eager")),
    "gemma2-eager": lambda: Gemma2ForCausalLM(
        Gemma2Config(**_SIZES, num_key_value_heads=2, head_dim=8, sliding_window=8, attn_implementation="eager")
    ),
    **collecting.BUILD,
}
NAMES = ("llama", "qwen3", "qwen3moe", "balanced", "gpt2", "neox", "phi3", "olmo2", "bert", "vit", "decoder", *OWN)


def built(name: str) -> nn.Module:
    seeds.start()
    return OWN[name]() if name in OWN else zoo.build(name)


def batch_of(name: str, step: int = 0, *, samples: int = 2, length: int = LENGTH) -> Batch:
    """Return a step's batch. Odd steps pad the first sample left and the last one right; some labels are ignored."""
    random = seeds.generator(step)
    if name == "vit":
        return zoo.batch(name, step, samples)
    if name in collecting.BUILD:
        return collecting.batch(name, step, samples)
    tokens = torch.randint(3, VOCAB, (samples, length + 1), generator=random)
    if name.startswith("decoder"):
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    tokens, mask = tokens[:, 1:], torch.ones(samples, length, dtype=torch.long)
    if step % 2:
        mask[0, :3], mask[-1, length - 5 :] = 0, 0
    labels = tokens.masked_fill(mask == 0, -100)
    labels[0, 7 % length] = -100
    if name.startswith("t5"):  # encoder length: the decoder's, a shorter one, that of a rank's slice of the decoder
        kept = (length, 9, 12 if length == LENGTH else 7)[step % 3]
        return {"input_ids": tokens[:, :kept], "attention_mask": mask[:, :kept], "labels": labels}
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


@contextmanager
def connected() -> Iterator[Collectives]:
    """Connect all ranks along the sequence axis."""
    mesh = Mesh(MeshShape(sequence=world()), HOST, Processes(HOST, Rendezvous(rank(), world(), 60.0)))
    try:
        collectives = Collectives(mesh)
        collectives.open([("sequence",)])
        yield collectives
    finally:
        mesh.close()


@contextmanager
def on_slices(model: nn.Module, collectives: Collectives) -> Iterator[SequenceParallel]:
    transforms = ModuleTransforms()
    with transforms.temporary():
        group, alone = collectives.group(("sequence",)), collectives.group(())
        changes = transforms.at(Order.SEQUENCE)
        parallel = SequenceParallel(model, collectives.mesh, group, alone, changes)
        blocks = [name for stack in parallel.stacks for name in stack.blocks]
        BlockOutputs(model, blocks, parallel.stacks, changes, across_stages=False)
        yield parallel


@dataclass
class Beside:
    """Largest differences of a model on slices from the full model.

    Attributes:
        loss: the largest difference of a loss.
        gradient: the largest difference of a gradient, relative to the gradient's largest element.
        name: the parameter of that gradient.
    """

    loss: float = 0.0
    gradient: float = 0.0
    name: str = ""


def beside_whole(name: str) -> Beside:
    """Compare a model on slices with the full model, on two batches of 23 positions and one of 14."""
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
    """Return the mean of the ranks' gradients, as the engine computes it."""
    gradient = torch.zeros_like(param) if param.grad is None else param.grad
    return group.sum(gradient, "test") / group.size


# -- one attention -----------------------------------------------------------------------------------------------------

WAYS = (ALL_TO_ALL, GATHER_KEYS, RING)


@dataclass
class Alone:
    """Result of one attention on slices: the largest difference of its output and gradients from full attention, and
    the bytes that this rank sent in forward and in backward, as counted and by the formula.
    """

    off: float
    counted: tuple[int, int]
    formula: tuple[int, int]


def attention_alone(way: str, heads: int, key_heads: int, mask: str) -> Alone:
    generator = seeds.generator(3)
    shapes = [(2, count, LENGTH, 8) for count in (heads, key_heads, key_heads)]
    whole = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    weights = torch.randn((2, heads, LENGTH, 8), generator=generator)
    options: dict[str, Any] = {
        "attn_mask": _mask(mask, generator),
        "is_causal": mask == "causal",
        "enable_gqa": heads != key_heads,
    }
    expected = F.scaled_dot_product_attention(*whole, **options)
    (expected * weights).sum().backward()
    with (
        connected() as collectives,
        mock.patch.object(attention, "choose", return_value=way),
        mock.patch.object(ring, "PIECE", 3),
    ):
        slices = Slices.even(LENGTH, collectives.group(("sequence",)), collectives.mesh)
        own = [slices.take(tensor.detach(), 2).clone().requires_grad_() for tensor in whole]
        with attention.on_slices(slices, intercept=True):
            found = F.scaled_dot_product_attention(*own, **options)
        forward = collectives.meter.report().sent_bytes("sequence")
        (found * slices.take(weights, 2)).sum().backward()
        backward = collectives.meter.report().sent_bytes("sequence") - forward
    off = [float((found - slices.take(expected, 2)).detach().abs().max())]
    for mine, tensor in zip(own, whole, strict=True):
        assert mine.grad is not None
        assert tensor.grad is not None
        off.append(float((mine.grad - slices.take(tensor.grad, 2)).abs().max()))
    sizes = Sizes(heads, key_heads, 8, 8, tuple(stop - start for start, stop in slices.ranges), batch=2)
    formula = sizes.sent_bytes(way)[rank()], sizes.sent_bytes(way, backward=True)[rank()]
    return Alone(max(off), (forward, backward), formula)


def saved_by_causal_attention(heads: int, key_heads: int) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors that causal attention on slices saves for backward."""
    shapes, generator = list[tuple[int, ...]](), seeds.generator(3)

    def keep(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with connected() as collectives, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        slices = Slices.even(LENGTH, collectives.group(("sequence",)), collectives.mesh)
        own = [
            torch.randn((2, count, slices.num_own, 8), generator=generator, requires_grad=True)
            for count in (heads, key_heads, key_heads)
        ]
        with attention.on_slices(slices, intercept=True):
            F.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=heads != key_heads).sum().backward()
    return shapes


def _mask(kind: str, generator: torch.Generator) -> Tensor | None:
    """Return a mask that broadcasts to [batch, heads, positions, positions]; every query sees at least one key."""
    if kind == "padding":
        seen = torch.rand((2, 1, 1, LENGTH), generator=generator) < 0.7
        seen[..., 0] = True
        return seen
    if kind == "added":
        return torch.randn((LENGTH, LENGTH), generator=generator)
    if kind == "window":
        position = torch.arange(LENGTH)
        return ((position[:, None] - position).abs() < 4)[None, None]
    return None


# -- recomputation and logits ------------------------------------------------------------------------------------------


class Checkpointing(Block):
    """Block that checkpoints its call, including the module's hooks."""

    def __call__(self, x: Tensor, table: Tensor) -> Any:
        return checkpoint(super().__call__, x, table, use_reentrant=False)


def recomputed(name: str, by: str) -> tuple[float, float]:
    """Return the largest change of a gradient by recomputation, and the largest gradient. Two forwards of different
    lengths run before their backwards.
    """
    results = []
    for again in (False, True):
        model = built(name)
        with connected() as collectives, on_slices(model, collectives) as parallel:
            transforms = ModuleTransforms()
            if again and by == "model":
                model.activation_checkpointing_enable()
            elif again and by == "user":
                for block in model.blocks:
                    block.__class__ = Checkpointing
            elif again:
                blocks = dict(parallel.stacks[0].blocks)
                Recomputation(blocks, transforms.at(Order.RECOMPUTE), selective=False, tiled={})
            losses = [zoo.loss_of(model(**batch_of(name, step, length=length))) for step, length in enumerate((23, 14))]
            for loss in losses:
                loss.backward()
            transforms.undo()
        results.append([param.grad.clone() for param in model.parameters() if param.grad is not None])
    off = max(float((one - other).abs().max()) for one, other in zip(*results, strict=True))
    return off, max(float(gradient.abs().max()) for gradient in results[0])


def logits_bytes(name: str) -> tuple[int, int, int]:
    """Return numbers of elements: of the largest tensor over the vocabulary in a forward and backward, of this rank's
    logits, and of all logits.
    """
    model, largest = built(name), 0
    batch = batch_of(name)

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(out):
                shape = tensor.shape[-2:] if isinstance(tensor, Tensor) and not tensor.is_meta else ()
                if shape[1:] == (VOCAB,) and shape[0] != WIDTH:  # not the head's weight or its gradient
                    largest = max(largest, tensor.numel())
            return out

    with connected() as collectives, on_slices(model, collectives), Largest():
        zoo.loss_of(model(**batch)).backward()
    positions = even(LENGTH, world())[rank()]
    return largest, 2 * (positions[1] - positions[0]) * VOCAB, 2 * LENGTH * VOCAB


def whole_logits(name: str) -> float:
    """Return the largest difference of read logits, and of gradients through them, from those of the full model."""
    whole = built(name)
    model, batch = copy.deepcopy(whole), batch_of(name)
    batch.pop("targets", None)
    with connected() as collectives, on_slices(model, collectives):
        results = []
        for each in (whole, model):
            logits = each(**batch)
            logits = logits if isinstance(logits, Tensor) else logits.logits
            assert logits.shape == (2, LENGTH, VOCAB)
            assert repr(logits).startswith(f"{type(logits).__name__}(shape (2, 23, 128)") == (each is model)
            logits.softmax(-1)[:, 3:5].square().sum().backward()
            results.append(logits + torch.zeros(logits.shape))
        off = [float((results[0] - results[1]).detach().abs().max())]
        for wanted, param in zip(whole.parameters(), model.parameters(), strict=True):
            gradient = mean_gradient(param, collectives.group(("sequence",)))
            off.append(float((gradient - (0 if wanted.grad is None else wanted.grad)).abs().max()))
    return max(off)


def losses_of_own(name: str) -> list[tuple[float, float]]:
    """Return losses as users write them, each computed from sliced and from full logits."""
    whole = built(name)
    model, tokens = copy.deepcopy(whole), batch_of(name)["tokens"]
    weight = torch.rand(VOCAB, generator=seeds.generator(5))
    targets = tokens.masked_fill(tokens % 5 == 0, -100)

    def losses(logits: Any) -> list[Tensor]:
        logits = logits.float() / 2.0
        flat, shifted = logits.view(-1, VOCAB), logits[:, :-1]
        return [
            F.cross_entropy(flat, targets.flatten()),
            F.cross_entropy(flat, targets.reshape(-1), weight=weight, label_smoothing=0.1),
            F.cross_entropy(shifted.flatten(0, 1), targets[:, 1:].flatten(), reduction="sum"),
            F.cross_entropy(logits[..., 20:, :].reshape(-1, VOCAB), tokens[:, 20:].flatten(), ignore_index=3),
            F.cross_entropy(flat, targets.flatten(), reduction="none").mean(),
            F.nll_loss(logits.log_softmax(-1).transpose(1, 2), targets),
        ]

    with connected() as collectives, on_slices(model, collectives):
        return [
            (found.item(), expected.item())
            for found, expected in zip(losses(model(tokens)), losses(whole(tokens)), strict=True)
        ]


# -- engines -----------------------------------------------------------------------------------------------------------

STEPS, CLIP = 10, 0.5
ADAMW: dict[str, Any] = {"lr": 2e-3, "eps": 1e-4}  # limits updates by gradients that are only rounding errors


def trained(name: str, sequence: int, stage: int = 1, **sections: Any) -> Trained:
    """Train with an engine on the data coordinate's samples, of changing lengths; keep the first step's gradients."""
    config = {
        "parallel": {"sequence": sequence},
        "clip_grad_norm": CLIP,
        "optimizer": ADAMW,
        "zero": {"stage": stage},
        **sections,
    }
    model = built(name)
    if hasattr(model, "config"):
        model.config.use_cache = True  # the default of transformers, which training does not need
    with partita.initialize(model, config) as engine:
        data = engine.mesh.coordinate("data")
        return train_engine(engine, _loss_of(name), STEPS, data=data, keep=(0,), mean=True)


def trained_plainly(name: str, num_data: int) -> Trained:
    """Train with plain PyTorch in one process, on the samples of all data coordinates."""
    optimizer = partial(torch.optim.AdamW, weight_decay=0.01, **ADAMW)
    return train_module(
        built(name), _loss_of(name), STEPS, num_data=num_data, own=None, optimizer=optimizer, clip=CLIP, keep=(0,)
    )


def _loss_of(name: str) -> Loss:
    return lambda model, data, step: zoo.loss_of(model(**_samples(name, step, data)))


def _samples(name: str, step: int, data: int) -> Batch:
    return batch_of(name, 10 * step + data, length=LENGTH - 4 * (step % 2))


# The numbers of samples and positions of each step's batch.
FEW = {
    "no samples": ((0, LENGTH), (2, LENGTH), (0, LENGTH), (2, LENGTH)),
    "few positions": ((2, 1), (2, LENGTH), (2, 2), (2, LENGTH)),
}


class Attending(nn.Module):
    """A block whose reshapes accept a batch without samples."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 6, WIDTH // 6)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2).tanh()


class Attender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Attending(), Attending()])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).tanh()


def trained_on_few(name: str, what: str, sequence: int | None) -> Trained:
    """Train on batches without samples, or with fewer positions than ranks; ``sequence=None``: with plain PyTorch."""

    def loss(model: Any, data: int, step: int) -> Tensor:
        samples, length = FEW[what][step]
        tokens = batch_of("decoder", step, length=length)["tokens"][:samples]
        output = model(tokens)
        logits = output if isinstance(output, Tensor) else output.logits
        return F.cross_entropy(logits.reshape(-1, VOCAB), tokens.reshape(-1), reduction="sum") / LENGTH

    seeds.start()
    model = Attender() if name == "own" else built(name)
    if sequence is None:
        optimizer = partial(torch.optim.AdamW, weight_decay=0.01, **ADAMW)
        return train_module(model, loss, len(FEW[what]), num_data=1, own=None, optimizer=optimizer, clip=CLIP)
    config = {"parallel": {"sequence": sequence}, "clip_grad_norm": CLIP, "optimizer": ADAMW, "zero": {"stage": 2}}
    with partita.initialize(model, config) as engine:
        return train_engine(engine, loss, len(FEW[what]), data=0)


# -- models that cannot be split ---------------------------------------------------------------------------------------


GATES = {"gate of 0": 0.0, "gate of 1e-6": 1e-6}


class _GradientsOfNormOne(torch.autograd.Function):
    """Identity whose backward divides the gradient by its norm over all positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] / gradients[0].norm()


class Mixing(nn.Module):
    """Block of [batch, positions, WIDTH] in which positions depend on each other in one of several ways (``how``)."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(WIDTH, WIDTH), how
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        if how in GATES:
            self.gate = nn.Parameter(torch.full((WIDTH,), GATES[how]))
        if how == "batch norm":
            self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        if self.how == "by hand":
            heads = self.layer(x)
            return x + (heads @ heads.mT).softmax(-1) @ heads
        if self.how == "causal by hand":  # correct on the first rank's slice
            heads = self.layer(x)
            seen = torch.ones(x.shape[1], x.shape[1]).tril() > 0
            return x + (heads @ heads.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ heads
        if self.how == "convolution":
            return x + self.convolution(x.mT).mT
        if self.how in GATES:
            return x + self.gate * self.convolution(x.mT).mT
        if self.how == "gradients":
            return x + _GradientsOfNormOne.apply(self.layer(x))
        if self.how == "batch norm":
            return x + self.norm(x.mT).mT
        if self.how == "alike":  # all positions of the first block's input are equal
            return x + self.layer(x.mean(1, keepdim=True))
        if self.how == "table":
            return x + self.layer(x) * torch.arange(LENGTH)[None, :, None]
        return x + self.layer(x)


class Mixer(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.embedding = how, nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Mixing(how), Mixing(how)])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(torch.zeros_like(tokens) if self.how == "alike" else tokens)
        blocks = list(self.blocks)
        for block in {"first left out": blocks[1:], "last left out": blocks[:1]}.get(self.how, blocks):
            x = block(x)
            if self.how == "between":
                x = torch.cat((x, x[:, -1:]), 1)
        return self.head(x)


def mixed(how: str, config: Mapping[str, Any] = {}) -> bool:
    """Return whether a step of a model with such blocks updates the parameters."""
    seeds.start()
    with partita.initialize(Mixer(how), {"parallel": {"sequence": world()}, **config}) as engine:
        tokens = batch_of("decoder")["tokens"]
        engine.backward(F.cross_entropy(engine(tokens).flatten(0, 1), tokens.flatten()))
        return engine.step().stepped


def without_first_block() -> list[tuple[float, float]]:
    """Return the losses of a forward that leaves out the first block, and those of one process, by length. The second
    length is that of a rank's slice of the first.
    """
    seeds.start()
    model, losses = Mixer("first left out"), []
    plain = copy.deepcopy(model)
    with partita.initialize(model, {"parallel": {"sequence": world()}}) as engine:
        for length in (22, 11):
            tokens = batch_of("decoder", length=length)["tokens"]
            found, expected = (
                F.cross_entropy(each(tokens).flatten(0, 1), tokens.flatten()) for each in (engine, plain)
            )
            losses.append((found.item(), expected.item()))
    return losses


def first_call_changes() -> list[str]:
    """Return the names of what the first, checked call changed: random state, parameters, buffers, training modes."""
    seeds.start()
    model = Mixer("nothing")
    for block in model.blocks:
        block.register_buffer("scale", torch.ones(3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    zero = {"stage": 3, "units": ["Mixing", "Linear"]}  # parameters inside a block are sharded until they are used
    with partita.initialize(model, {"parallel": {"sequence": world()}, "zero": zero}) as engine:
        state = torch.get_rng_state()
        engine(batch_of("decoder")["tokens"])
        changed = [] if torch.equal(state, torch.get_rng_state()) else ["random state"]
        with engine.gathered():
            after = model.state_dict()
            changed += [name for name, value in before.items() if not torch.equal(value, after[name])]
        changed += [name for name, module in model.named_modules() if not module.training]
    return changed


class Penalized(Mixer):
    """Model that penalizes gradients inside its forward, or returns its embeddings for a penalty outside of it."""

    def __init__(self, how: str) -> None:
        super().__init__("nothing")
        self.penalty = how

    def forward(self, tokens: Tensor) -> Any:
        x = first = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())
        if self.penalty == "outside":
            return loss, first
        (gradient,) = torch.autograd.grad(loss, first, create_graph=self.penalty == "inside")
        return loss + gradient.square().sum()


def penalized(how: str) -> None:
    """Compute gradients inside the model's forward, or gradients of gradients outside of it; raises an error."""
    seeds.start()
    with partita.initialize(Penalized(how), {"parallel": {"sequence": world()}}) as engine:
        loss, first = engine(batch_of("decoder")["tokens"])
        torch.autograd.grad(loss, first, create_graph=True)


def mixed_in_stages(how: str) -> None:
    seeds.start()
    config = {"parallel": {"sequence": 2, "pipeline": 2}}
    loss_fn = lambda output, tokens: F.cross_entropy(output.flatten(0, 1), tokens.flatten())  # noqa: E731
    with partita.initialize(Mixer(how), config, loss_fn=loss_fn) as engine:
        engine.train_batch([batch_of("decoder")["tokens"]])


def refused(what: str) -> None:
    """Run a model or a call that sequence parallelism does not support; raises an error."""
    model, batch = built("llama"), batch_of("llama")
    if what == "capacity":
        model = SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(**_SWITCH))
    elif what == "no blocks":
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    elif what == "flash":
        model.config._attn_implementation_internal = "flash_attention_2"
    elif what == "collected":
        batch["output_attentions"] = True  # type: ignore[assignment]
    with partita.initialize(model, {"parallel": {"sequence": world()}}) as engine:
        output = engine(**batch)
        if what == "alone" and rank() == 0:
            output.logits.argmax(-1)
        if what == "cached":
            cache = engine(batch["input_ids"], use_cache=True).past_key_values
            engine(batch["input_ids"][:, :1], past_key_values=cache, use_cache=True)
        engine.backward(output.loss)


def cached() -> tuple[float, list[int]]:
    """Fill a cache in the first call; return the difference of its loss, and this rank's cached positions per layer."""
    model, batch = built("llama"), batch_of("llama")
    expected = model(**batch, use_cache=True).loss.item()
    with partita.initialize(model, {"parallel": {"sequence": world()}}) as engine:
        output = engine(**batch, use_cache=True)
        return abs(output.loss.item() - expected), [layer.keys.shape[2] for layer in output.past_key_values.layers]


def generated() -> bool:
    """Return whether text generated inside ``gathered`` is one process's, and later losses on slices are unchanged."""
    model, batch = built("llama"), batch_of("llama")
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "use_cache": True}
    tokens = batch["input_ids"][:, :7]
    expected = copy.deepcopy(model).generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    with partita.initialize(model, {"parallel": {"sequence": world()}, "zero": {"stage": 3}}) as engine:
        losses = [engine(**batch).loss.item()]
        with engine.gathered():
            found = engine.module.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        losses.append(engine(**batch).loss.item())
        assert "model.layers.0: a slice of the sequence, attention by sdpa" in engine.explain()
    assert model.config._attn_implementation == "sdpa"
    assert not any("forward" in vars(module) for module in model.modules())
    return torch.equal(found, expected) and losses[0] == losses[1]


# -- dropout -----------------------------------------------------------------------------------------------------------


def masks(sequence: int, seed: int | None) -> list[Tensor]:
    """Return this rank's dropout masks: that of the dropout before the blocks, then that of each block."""
    seen = list[Tensor]()
    model = Mixer("nothing").train()
    model.embedding = nn.Sequential(model.embedding, nn.Dropout(0.5))
    for block in model.blocks:
        block.layer = nn.Dropout(0.5)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda module, args, out: module.training and seen.append((out != 0).detach()))
    torch.manual_seed(rank())
    with partita.initialize(model, {"parallel": {"sequence": sequence}, "seed": seed}) as engine:
        tokens = batch_of("decoder")["tokens"]
        engine(tokens)
    return seen


def hooked(when: str) -> None:
    """Train with a hook that divides a gradient by its norm, registered before or after the engine is created."""
    torch.manual_seed(0)
    model = Decoder(DecoderShape(layers=2, width=32, heads=4, kv_heads=2, ffn_width=64, vocab=32))
    param = next(model.parameters())
    if when == "before":
        param.register_hook(lambda gradient: gradient / gradient.norm())
    with partita.initialize(model, {"parallel": {"sequence": 2}}) as engine:
        if when == "after":
            param.register_hook(lambda gradient: gradient / gradient.norm())
        tokens = torch.arange(17).view(1, 17)
        engine.backward(engine(tokens=tokens[:, :-1], targets=tokens[:, 1:]))
