"""Small models of many fields in plain PyTorch, each with a batch and a loss, as users train them in 16 bits.

The models are written as is usual in their fields: with fp32 values created in forward, buffers, parameters that are
read directly, targets as arguments, and losses inside and outside of the model.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations


@dataclass(frozen=True)
class Case:
    """A model, the arguments of its forward, and the loss of its output (None: the model returns the loss)."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Tensor] | None = None


PLAIN: dict[str, Callable[[], Case]] = {}
B, D = 8, 32


def _case(make: Callable[[], Case]) -> Callable[[], Case]:
    PLAIN[make.__name__.strip("_")] = make
    return make


def mse(target: Tensor) -> Callable[[Any], Tensor]:
    return lambda output: F.mse_loss(output, target)


def entropy(target: Tensor) -> Callable[[Any], Tensor]:
    return lambda output: F.cross_entropy(output, target)


def classes(*shape: int, num: int = 10) -> Tensor:
    return torch.randint(0, num, shape)


class Net(nn.Module):
    """A module whose forward is a given function."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def param(*shape: int, scale: float = 0.1) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * scale)


def linear(inputs: int = D, outputs: int = D) -> nn.Linear:
    return nn.Linear(inputs, outputs)


def images(size: int = 16, channels: int = 3) -> Tensor:
    return torch.randn(B, channels, size, size)


def tokens(length: int = 16, num: int = 50) -> Tensor:
    return torch.randint(0, num, (B, length))


def heads(x: Tensor, num: int = 4) -> Tensor:
    return x.view(*x.shape[:2], num, -1).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


# ------------------------------------------------------------------------------------------------- dense and recurrent


@_case
def _mlp() -> Case:
    return Case(
        nn.Sequential(linear(), nn.GELU(), nn.LayerNorm(D), linear(D, 10)),
        (torch.randn(B, D),),
        {},
        entropy(classes(B)),
    )


@_case
def _batch_norm_mlp() -> Case:
    return Case(
        nn.Sequential(linear(), nn.BatchNorm1d(D), nn.ReLU(), linear(D, 1)),
        (torch.randn(B, D),),
        {},
        mse(torch.randn(B, 1)),
    )


@_case
def _residual_mlp() -> Case:
    blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(D), linear(D, 2 * D), nn.SiLU(), linear(2 * D)) for _ in range(3))

    def run(net: Any, x: Tensor) -> Tensor:
        for block in net.blocks:
            x = x + block(x)
        return x

    return Case(Net(run, blocks=blocks), (torch.randn(B, D),), {}, mse(torch.randn(B, D)))


@_case
def _highway() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        gate = net.gate(x).sigmoid()
        return gate * net.value(x).relu() + (1 - gate) * x

    return Case(Net(run, gate=linear(), value=linear()), (torch.randn(B, D),), {}, mse(torch.randn(B, D)))


@_case
def _lstm() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        return net.head(net.rnn(x)[0][:, -1])

    model = Net(run, rnn=nn.LSTM(D, D, 2, batch_first=True), head=linear(D, 10))
    return Case(model, (torch.randn(B, 6, D),), {}, entropy(classes(B)))


@_case
def _gru_with_zero_state() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        return net.rnn(x, torch.zeros(1, B, D))[0].mean(1)

    return Case(Net(run, rnn=nn.GRU(D, D, batch_first=True)), (torch.randn(B, 6, D),), {}, mse(torch.randn(B, D)))


@_case
def _lstm_cell_loop() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        state = torch.zeros(B, D), torch.zeros(B, D)
        for step in range(x.shape[1]):
            state = net.cell(x[:, step], state)
        return net.head(state[0])

    model = Net(run, cell=nn.LSTMCell(D, D), head=linear())
    return Case(model, (torch.randn(B, 5, D),), {}, mse(torch.randn(B, D)))


@_case
def _handwritten_rnn() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        h = x.new_zeros(B, D)
        for step in range(x.shape[1]):
            h = torch.tanh(x[:, step] @ net.w_in + h @ net.w_hidden + net.bias)
        return h

    model = Net(run, w_in=param(D, D), w_hidden=param(D, D), bias=param(D))
    return Case(model, (torch.randn(B, 5, D),), {}, mse(torch.randn(B, D)))


# ------------------------------------------------------------------------------------------------------------- images


@_case
def _batch_norm_cnn() -> Case:
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU()
    )
    model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear(8, 10))
    return Case(model, (images(),), {}, entropy(classes(B)))


@_case
def _group_norm_cnn() -> Case:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.AvgPool2d(14), nn.Flatten(), linear(8, 10)
    )
    return Case(model, (images(),), {}, entropy(classes(B)))


@_case
def _resnet() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        x = net.stem(x)
        x = F.relu(x + net.second(net.first(x).relu()))
        return net.head(x.mean((2, 3)))

    def conv() -> nn.Module:
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))

    model = Net(run, stem=nn.Conv2d(3, 8, 3), first=conv(), second=conv(), head=linear(8, 10))
    return Case(model, (images(),), {}, entropy(classes(B)))


@_case
def _depthwise() -> Case:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, groups=1), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8),
        nn.Hardswish(), nn.Conv2d(8, 16, 1), nn.AdaptiveMaxPool2d(1), nn.Flatten(), linear(16, 10),
    )  # fmt: skip
    return Case(model, (images(),), {}, entropy(classes(B)))


@_case
def _convnext_block() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        y = net.conv(x).permute(0, 2, 3, 1)
        y = net.norm(y)
        y = net.down(F.gelu(net.up(y))) * net.gamma
        return x + y.permute(0, 3, 1, 2)

    model = Net(
        run,
        conv=nn.Conv2d(3, 3, 7, padding=3, groups=3),
        norm=nn.LayerNorm(3),
        up=linear(3, 12),
        down=linear(12, 3),
        gamma=nn.Parameter(torch.ones(3) * 1e-2),
    )
    return Case(model, (images(),), {}, mse(images()))


@_case
def _unet() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        first = net.down(x).relu()
        second = net.deeper(F.max_pool2d(first, 2)).relu()
        return net.out(torch.cat([first, net.up(second)], 1))

    model = Net(
        run, down=nn.Conv2d(3, 8, 3, padding=1), deeper=nn.Conv2d(8, 16, 3, padding=1),
        up=nn.ConvTranspose2d(16, 8, 2, 2), out=nn.Conv2d(16, 5, 1),
    )  # fmt: skip
    return Case(model, (images(),), {}, entropy(classes(B, 16, 16, num=5)))


@_case
def _upsampling_decoder() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        x = F.interpolate(net.first(x).relu(), scale_factor=2, mode="bilinear")
        return net.second(x).tanh()

    model = Net(run, first=nn.Conv2d(3, 8, 3, padding=1), second=nn.Conv2d(8, 3, 3, padding=1))
    return Case(model, (images(8),), {}, lambda y: F.l1_loss(y, torch.zeros_like(y) + 0.25))


@_case
def _normalized_by_buffers() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        return net.head(net.conv((x - net.mean) / net.std).relu().mean((2, 3)))

    model = Net(run, conv=nn.Conv2d(3, 8, 3), head=linear(8, 10))
    model.register_buffer("mean", torch.rand(1, 3, 1, 1))
    model.register_buffer("std", torch.rand(1, 3, 1, 1) + 0.5)
    return Case(model, (images(),), {}, entropy(classes(B)))


@_case
def _frozen_batch_norm() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        scale = net.weight * (net.var + 1e-5).rsqrt()
        x = net.conv(x)
        x = x * scale.view(1, -1, 1, 1) + (net.bias - net.mean * scale).view(1, -1, 1, 1)
        return net.head(x.relu().mean((2, 3)))

    model = Net(run, conv=nn.Conv2d(3, 8, 3), head=linear(8, 10))
    for name, value in {
        "weight": torch.rand(8),
        "bias": torch.randn(8),
        "mean": torch.randn(8),
        "var": torch.rand(8),
    }.items():
        model.register_buffer(name, value)
    return Case(model, (images(),), {}, entropy(classes(B)))


@_case
def _vision_transformer() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        x = net.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([net.cls.expand(B, -1, -1), x], 1) + net.positions
        return net.head(net.encoder(x)[:, 0])

    layer = nn.TransformerEncoderLayer(D, 4, 64, 0.0, batch_first=True, norm_first=True)
    model = Net(
        run,
        patch=nn.Conv2d(3, D, 4, 4),
        cls=param(1, 1, D),
        positions=param(1, 17, D),
        encoder=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        head=linear(D, 10),
    )
    return Case(model, (images(),), {}, entropy(classes(B)))


@_case
def _window_attention() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        q, k, v = map(heads, net.qkv(x).chunk(3, -1))
        bias = net.table[net.index].permute(2, 0, 1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(8) + bias + net.mask
        return net.out(merged(scores.softmax(-1) @ v))

    model = Net(run, qkv=linear(D, 3 * D), out=linear(), table=param(31, 4))
    model.register_buffer("index", torch.arange(16)[:, None] - torch.arange(16) + 15)
    model.register_buffer("mask", torch.where(torch.rand(16, 16) < 0.3, -100.0, 0.0))
    return Case(model, (torch.randn(B, 16, D),), {}, mse(torch.randn(B, 16, D)))


@_case
def _stochastic_depth() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        for block in net.blocks:
            keep = torch.rand(x.shape[0], 1, device=x.device) < 0.7
            x = x + block(x) * keep / 0.7
        return x

    return Case(
        Net(run, blocks=nn.ModuleList(linear() for _ in range(3))), (torch.randn(B, D),), {}, mse(torch.randn(B, D))
    )


@_case
def _segmentation_in_forward() -> Case:
    def run(net: Any, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        logits = net.body(x)
        dice = (logits.softmax(1)[:, 1] * (target == 1)).sum() / (target == 1).sum().clamp(min=1)
        return {"loss": F.cross_entropy(logits, target) + 1 - dice, "logits": logits}

    model = Net(run, body=nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1)))
    return Case(model, (images(),), {"target": classes(B, 16, 16, num=4)}, lambda output: output["loss"])


@_case
def _heatmaps() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        maps = net.body(x).flatten(2).softmax(-1)
        grid = torch.linspace(0, 1, maps.shape[-1])
        return (maps * grid).sum(-1)

    model = Net(run, body=nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 5, 1)))
    return Case(model, (images(),), {}, mse(torch.rand(B, 5)))


@_case
def _detector() -> Case:
    def run(net: Any, x: Tensor, targets: list[dict[str, Tensor]]) -> Tensor:
        boxes = torch.stack([target["boxes"] for target in targets])
        found = net.head(x.mean((2, 3))) * 640
        return F.smooth_l1_loss(found, boxes, beta=10.0) / 100

    targets = [{"boxes": torch.rand(4) * 1333, "score": torch.rand(1)} for _ in range(B)]
    return Case(Net(run, head=linear(3, 4)), (images(), targets))


@_case
def _spatial_transformer() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        theta = net.where(x.mean((2, 3))).view(-1, 2, 3) * 0.1 + torch.eye(2, 3)
        return net.conv(F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False))

    return Case(Net(run, where=linear(3, 6), conv=nn.Conv2d(3, 3, 3)), (images(),), {}, mse(torch.randn(B, 3, 14, 14)))


# -------------------------------------------------------------------------------------------------------------- text


def _decoder(attend: Callable[..., Tensor], **more: Any) -> Case:
    """Return a tied language model of one block with this attention."""

    def run(net: Any, ids: Tensor) -> Tensor:
        x = net.embed(ids)
        x = x + net.out(attend(net, *map(heads, net.qkv(net.norm(x)).chunk(3, -1))))
        return net.last(x) @ net.embed.weight.T

    parts = {
        "embed": nn.Embedding(50, D),
        "norm": nn.LayerNorm(D),
        "qkv": linear(D, 3 * D),
        "out": linear(),
        "last": nn.LayerNorm(D),
    }
    nn.init.normal_(parts["embed"].weight, std=0.1)
    ids = tokens()
    return Case(
        Net(run, **parts, **more), (ids,), {}, lambda y: F.cross_entropy(y[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    )


@_case
def _causal_decoder() -> Case:
    return _decoder(lambda net, q, k, v: merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


@_case
def _handwritten_attention() -> Case:
    def attend(net: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.full((16, 16), torch.finfo(torch.float32).min).triu(1)
        return merged((q @ k.transpose(-1, -2) / math.sqrt(8) + mask).softmax(-1) @ v)

    return _decoder(attend)


@_case
def _rotary() -> Case:
    def attend(net: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        angles = torch.arange(16).float()[:, None] * 10000 ** (-torch.arange(0, 8, 2) / 8)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

        def turned(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return x * cos + torch.cat([-second, first], -1) * sin

        return merged(F.scaled_dot_product_attention(turned(q), turned(k).to(q.dtype), v.to(q.dtype), is_causal=True))

    return _decoder(attend)


@_case
def _complex_rotary() -> Case:
    turns = torch.polar(torch.ones(16, 4), torch.arange(16).float()[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001]))

    def attend(net: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def turned(x: Tensor) -> Tensor:
            pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * turns).flatten(3).type_as(x)

        return merged(F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True))

    return _decoder(attend)


@_case
def _alibi() -> Case:
    def attend(net: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slopes = 2.0 ** -torch.arange(1, 5)[:, None, None]
        bias = slopes * (torch.arange(16) - torch.arange(16)[:, None]).clamp(max=0)
        bias = bias.masked_fill(torch.ones(16, 16).triu(1).bool(), float("-inf"))
        return merged(F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype)))

    return _decoder(attend)


@_case
def _query_norm() -> Case:
    def attend(net: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        scores = (q @ k.transpose(-1, -2)) * net.scale.exp()
        return merged(scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v)

    return _decoder(attend, scale=nn.Parameter(torch.tensor(2.0)))


@_case
def _relative_bias() -> Case:
    def attend(net: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        distance = (torch.arange(16) - torch.arange(16)[:, None]).abs().clamp(max=7)
        bias = net.bias(distance).permute(2, 0, 1)[None]
        return merged((q @ k.transpose(-1, -2) + bias).softmax(-1) @ v)

    return _decoder(attend, bias=nn.Embedding(8, 4))


@_case
def _linear_attention() -> Case:
    def attend(net: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("bhnd,bhne->bhnde", k, v).cumsum(2)
        total = torch.einsum("bhnd,bhnd->bhn", q, k.cumsum(2))
        return merged(torch.einsum("bhnd,bhnde->bhne", q, state) / total[..., None])

    return _decoder(attend)


@_case
def _sinusoidal_positions() -> Case:
    def run(net: Any, ids: Tensor) -> Tensor:
        return net.head(net.layer(net.embed(ids) * math.sqrt(D) + net.table[: ids.shape[1]]).mean(1))

    model = Net(
        run,
        embed=nn.Embedding(50, D),
        layer=nn.TransformerEncoderLayer(D, 4, 64, 0.0, batch_first=True),
        head=linear(D, 10),
    )
    angles = torch.arange(32).float()[:, None] * torch.exp(-torch.arange(0, D, 2) * math.log(1e4) / D)
    model.register_buffer("table", torch.cat([angles.sin(), angles.cos()], 1))
    return Case(model, (tokens(),), {}, entropy(classes(B)))


@_case
def _translation() -> Case:
    def run(net: Any, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return net.head(net.body(net.embed(source), net.embed(target), tgt_mask=mask))

    body = nn.Transformer(D, 4, 1, 1, 64, 0.0, batch_first=True)
    model = Net(run, embed=nn.Embedding(50, D), body=body, head=linear(D, 50))
    return Case(
        model, (tokens(), tokens(12)), {}, lambda y: F.cross_entropy(y.flatten(0, 1), torch.arange(B * 12) % 50)
    )


@_case
def _padded_encoder() -> Case:
    def run(net: Any, ids: Tensor, mask: Tensor) -> Tensor:
        x = net.attention(*[net.embed(ids)] * 3, key_padding_mask=mask == 0, need_weights=False)[0]
        return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)

    model = Net(run, embed=nn.Embedding(50, D), attention=nn.MultiheadAttention(D, 4, batch_first=True))
    mask = (torch.arange(16) < torch.randint(4, 16, (B, 1))).float()
    return Case(model, (tokens(), mask), {}, mse(torch.randn(B, D)))


@_case
def _mixture_of_experts() -> Case:
    def run(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = F.linear(x.float(), net.router.float()).softmax(-1)
        chance, chosen = weights.max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(net.experts):
            rows = torch.where(chosen == number)[0]
            y = y.index_add(0, rows, (expert(x[rows]) * chance[rows, None]).to(y.dtype))
        return y, weights.mean(0).square().sum()

    model = Net(run, router=param(4, D), experts=nn.ModuleList(linear() for _ in range(4)))
    target = torch.randn(64, D)
    return Case(model, (torch.randn(64, D),), {}, lambda found: F.mse_loss(found[0], target) + 0.01 * found[1])


@_case
def _soft_mixture() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        every = torch.einsum("bd,kde->bke", x, net.experts)
        return torch.einsum("bke,bk->be", every, net.gate(x).softmax(-1))

    return Case(Net(run, experts=param(4, D, D), gate=linear(D, 4)), (torch.randn(B, D),), {}, mse(torch.randn(B, D)))


@_case
def _bag_of_words() -> Case:
    def run(net: Any, ids: Tensor, offsets: Tensor) -> Tensor:
        return net.head(net.bag(ids, offsets))

    model = Net(run, bag=nn.EmbeddingBag(50, D, mode="mean"), head=linear(D, 10))
    return Case(model, (torch.randint(0, 50, (64,)), torch.arange(0, 64, 8)), {}, entropy(classes(B)))


@_case
def _low_rank_adapter() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        return net.base(x) + (x @ net.a.T @ net.b.T) * 2.0

    model = Net(run, base=linear(), a=param(4, D), b=param(D, 4))
    model.base.requires_grad_(False)
    return Case(model, (torch.randn(B, D),), {}, mse(torch.randn(B, D)))


@_case
def _selective_scan() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        step = F.softplus(net.step(x))
        decay = torch.exp(-step * net.log_rate.exp())
        h, found = torch.zeros(B, D), []
        for at in range(x.shape[1]):
            h = decay[:, at] * h + step[:, at] * x[:, at]
            found.append(h)
        return net.out(torch.stack(found, 1)) + x * net.skip

    model = Net(run, step=linear(), log_rate=param(D), out=linear(), skip=nn.Parameter(torch.ones(D)))
    return Case(model, (torch.randn(B, 8, D),), {}, mse(torch.randn(B, 8, D)))


@_case
def _state_space_kernel() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        rate = -net.log_rate.exp() + 1j * net.frequency
        kernel = (net.weight * torch.exp(rate[:, None] * torch.arange(16))).real
        spectrum = torch.fft.rfft(kernel.float(), 32) * torch.fft.rfft(x.float().transpose(1, 2), 32)
        return net.out(torch.fft.irfft(spectrum)[..., :16].transpose(1, 2))

    model = Net(run, log_rate=param(D), frequency=param(D), weight=param(D, 1), out=linear())
    return Case(model, (torch.randn(B, 16, D),), {}, mse(torch.randn(B, 16, D)))


# ----------------------------------------------------------------------------------------------- generative, scientific


@_case
def _variational_autoencoder() -> Case:
    def run(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_var = net.encoder(x).chunk(2, -1)
        z = mean + torch.randn(mean.shape) * (0.5 * log_var).exp()
        return net.decoder(z), -0.5 * (1 + log_var - mean.square() - log_var.exp()).mean()

    model = Net(run, encoder=linear(D, 16), decoder=linear(8, D))
    target = torch.rand(B, D)
    return Case(model, (target,), {}, lambda y: F.binary_cross_entropy_with_logits(y[0], target) + 0.1 * y[1])


def _time_features(t: Tensor) -> Tensor:
    angles = t[:, None].float() * torch.exp(-math.log(1e4) * torch.arange(16) / 16)
    return torch.cat([angles.cos(), angles.sin()], -1)


@_case
def _diffusion() -> Case:
    def run(net: Any, x: Tensor, t: Tensor) -> Tensor:
        time = net.time(_time_features(t))
        return net.out(F.silu(net.norm(net.conv(x) + time[:, :, None, None])))

    model = Net(
        run,
        time=linear(D, 8),
        conv=nn.Conv2d(3, 8, 3, padding=1),
        norm=nn.GroupNorm(2, 8),
        out=nn.Conv2d(8, 3, 3, padding=1),
    )
    return Case(model, (images(), torch.rand(B) * 999), {}, mse(images()))


@_case
def _flow_matching() -> Case:
    def run(net: Any, start: Tensor, end: Tensor, t: Tensor) -> Tensor:
        x = (1 - t[:, None]) * start + t[:, None] * end
        return F.mse_loss(net.body(torch.cat([x, t[:, None]], -1)), end - start)

    model = Net(run, body=nn.Sequential(linear(D + 1, 64), nn.SiLU(), linear(64, D)))
    return Case(model, (torch.randn(B, D), torch.randn(B, D), torch.rand(B)))


@_case
def _adaptive_norm() -> Case:
    def run(net: Any, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate = net.modulation(F.silu(condition)).chunk(3, -1)
        return x + gate * net.body(F.layer_norm(x, (D,)) * (1 + scale) + shift)

    model = Net(run, modulation=linear(D, 3 * D), body=linear())
    return Case(model, (torch.randn(B, D), torch.randn(B, D)), {}, mse(torch.randn(B, D)))


@_case
def _coupling_flow() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        log_det = torch.zeros(B)
        for layer in net.layers:
            a, b = x.chunk(2, -1)
            log_scale, shift = layer(a).chunk(2, -1)
            log_scale = log_scale.tanh()
            x, log_det = torch.cat([b * log_scale.exp() + shift, a], -1), log_det + log_scale.sum(-1)
        return (0.5 * x.square().sum(-1) - log_det).mean() / D

    layers = nn.ModuleList(nn.Sequential(linear(16, 32), nn.ReLU(), linear(32, 32)) for _ in range(3))
    return Case(Net(run, layers=layers), (torch.randn(B, D),))


@_case
def _invertible_convolution() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        y = F.conv2d(x, net.weight[:, :, None, None])
        return y.square().mean() - torch.linalg.slogdet(net.weight)[1]

    return Case(
        Net(run, weight=nn.Parameter(torch.linalg.qr(torch.randn(3, 3))[0] + 0.1 * torch.randn(3, 3))), (images(),)
    )


@_case
def _codebook() -> Case:
    def run(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        z = net.encoder(x)
        nearest = torch.cdist(z.float(), net.codes.weight.float()).argmin(-1)
        code = net.codes(nearest)
        loss = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        return net.decoder(z + (code - z).detach()), loss

    model = Net(run, encoder=linear(D, 8), codes=nn.Embedding(4, 8), decoder=linear(8, D))
    x = torch.randn(B, D)
    return Case(model, (x,), {}, lambda y: F.mse_loss(y[0], x) + y[1])


@_case
def _mixture_density() -> Case:
    def run(net: Any, x: Tensor) -> tuple[Tensor, ...]:
        weight, mean, log_std = net.body(x).chunk(3, -1)
        return weight.log_softmax(-1), mean, log_std

    target = torch.randn(B, 1)

    def loss(found: Any) -> Tensor:
        weight, mean, log_std = found
        log_prob = -0.5 * ((target - mean) / log_std.exp()).square() - log_std
        return -torch.logsumexp(weight + log_prob, -1).mean()

    model = Net(run, body=nn.Sequential(linear(), nn.Tanh(), linear(D, 15)))
    return Case(model, (torch.randn(B, D),), {}, loss)


@_case
def _gaussian_policy() -> Case:
    def run(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return net.body(x), net.log_std.expand(B, -1)

    action = torch.randn(B, 4)

    def loss(found: Any) -> Tensor:
        mean, log_std = found
        return -torch.distributions.Normal(mean, log_std.exp()).log_prob(action).mean()

    return Case(Net(run, body=linear(D, 4), log_std=param(4)), (torch.randn(B, D),), {}, loss)


@_case
def _contrastive() -> Case:
    def run(net: Any, a: Tensor, b: Tensor) -> Tensor:
        a, b = F.normalize(net.left(a), dim=-1), F.normalize(net.right(b), dim=-1)
        return net.scale.exp() * a @ b.T

    model = Net(run, left=linear(), right=linear(), scale=nn.Parameter(torch.tensor(2.0)))
    return Case(model, (torch.randn(B, D), torch.randn(B, D)), {}, entropy(torch.arange(B)))


@_case
def _siamese() -> Case:
    def run(net: Any, a: Tensor, b: Tensor) -> Tensor:
        return F.cosine_similarity(net.body(a), net.body(b))

    sign = torch.ones(B)
    sign[::2] = -1
    return Case(
        Net(run, body=linear()), (torch.randn(B, D), torch.randn(B, D)), {}, lambda y: (y - sign).square().mean()
    )


@_case
def _triplets() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        return net.body(x)

    return Case(Net(run, body=linear()), (torch.randn(3 * B, D),), {}, lambda y: F.triplet_margin_loss(*y.chunk(3)))


@_case
def _speech_recognizer() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        return net.head(net.rnn(x)[0]).log_softmax(-1).transpose(0, 1)

    model = Net(run, rnn=nn.GRU(D, D, batch_first=True, bidirectional=True), head=linear(2 * D, 12))
    labels, inputs, lengths = torch.randint(1, 12, (B, 4)), torch.full((B,), 20), torch.full((B,), 4)
    return Case(model, (torch.randn(B, 20, D),), {}, lambda y: F.ctc_loss(y, labels, inputs, lengths))


@_case
def _spectrogram() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        found = torch.stft(x, 32, 16, window=torch.hann_window(32), return_complex=True).abs()
        return net.head((found + 1e-3).log().mean(-1))

    return Case(Net(run, head=linear(17, 10)), (torch.randn(B, 256),), {}, entropy(classes(B)))


@_case
def _causal_convolutions() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        for number, layer in enumerate(net.layers):
            value, gate = layer(F.pad(x, (2**number, 0))).chunk(2, 1)
            x = x + value.tanh() * gate.sigmoid()
        return net.out(x)

    layers = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**number) for number in range(3))
    return Case(
        Net(run, layers=layers, out=nn.Conv1d(8, 1, 1)), (torch.randn(B, 8, 32),), {}, mse(torch.randn(B, 1, 32))
    )


@_case
def _periodic_network() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        for layer in net.layers:
            x = torch.sin(30 * layer(x))
        return net.out(x)

    layers = nn.ModuleList([linear(2), linear()])
    for layer in layers:
        nn.init.uniform_(layer.weight, -0.02, 0.02)
    return Case(Net(run, layers=layers, out=linear(D, 3)), (torch.rand(64, 2),), {}, mse(torch.rand(64, 3)))


@_case
def _radiance_field() -> Case:
    def run(net: Any, points: Tensor) -> Tensor:
        angles = points[..., None] * 2.0 ** torch.arange(4)
        found = net.body(torch.cat([angles.sin(), angles.cos()], -1).flatten(2))
        alpha = 1 - torch.exp(-F.softplus(found[..., 3]) * 0.1)
        seen = torch.cumprod(torch.cat([torch.ones(B, 1), 1 - alpha + 1e-10], -1), -1)[:, :-1]
        return ((alpha * seen)[..., None] * found[..., :3].sigmoid()).sum(1)

    model = Net(run, body=nn.Sequential(linear(24, 64), nn.ReLU(), linear(64, 4)))
    return Case(model, (torch.rand(B, 16, 3),), {}, mse(torch.rand(B, 3)))


@_case
def _fourier_operator() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        modes = torch.fft.rfft(x.float())[..., :8]
        mixed = torch.einsum("bix,iox->box", modes, torch.view_as_complex(net.weight.float()))
        return net.skip(x) + torch.fft.irfft(mixed, n=x.shape[-1])

    model = Net(run, weight=param(8, 8, 8, 2), skip=nn.Conv1d(8, 8, 1))
    return Case(model, (torch.randn(B, 8, 32),), {}, mse(torch.randn(B, 8, 32)))


@_case
def _operator_network() -> Case:
    def run(net: Any, function: Tensor, point: Tensor) -> Tensor:
        return (net.branch(function) * net.trunk(point)).sum(-1) + net.bias

    model = Net(run, branch=linear(D, 16), trunk=nn.Sequential(linear(2, 16), nn.Tanh()), bias=param(1))
    return Case(model, (torch.randn(B, D), torch.rand(B, 2)), {}, mse(torch.randn(B)))


@_case
def _neural_ode() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        for _ in range(4):
            first = net.field(x)
            x = x + 0.25 * net.field(x + 0.125 * first)
        return x

    return Case(
        Net(run, field=nn.Sequential(linear(), nn.Tanh(), linear())), (torch.randn(B, D),), {}, mse(torch.randn(B, D))
    )


@_case
def _hypernetwork() -> Case:
    def run(net: Any, x: Tensor, style: Tensor) -> Tensor:
        weight = net.weights(style.mean(0)).view(8, 3, 3, 3)
        return F.conv2d(x, weight, net.bias).mean((2, 3))

    return Case(
        Net(run, weights=linear(D, 216), bias=param(8)), (images(), torch.randn(B, D)), {}, mse(torch.randn(B, 8))
    )


@_case
def _graph_convolution() -> Case:
    def run(net: Any, x: Tensor, edges: Tensor) -> Tensor:
        for layer in net.layers:
            degree = torch.zeros(20).index_add(0, edges[1], torch.ones(60)).clamp(min=1)
            messages = layer(x)[edges[0]]
            x = torch.zeros_like(messages[:20]).index_add(0, edges[1], messages) / degree[:, None]
        return x

    model = Net(run, layers=nn.ModuleList([linear(), linear(D, 10)]))
    return Case(model, (torch.randn(20, D), torch.randint(0, 20, (2, 60))), {}, entropy(classes(20)))


@_case
def _graph_attention() -> Case:
    def run(net: Any, x: Tensor, edges: Tensor) -> Tensor:
        h = net.body(x)
        scores = F.leaky_relu(h[edges[0]] @ net.source + h[edges[1]] @ net.target).float().exp()
        total = torch.zeros(20).scatter_add(0, edges[1], scores)
        share = (scores / (total[edges[1]] + 1e-6)).to(h.dtype)
        return torch.zeros_like(h).index_add(0, edges[1], h[edges[0]] * share[:, None])

    model = Net(run, body=linear(), source=param(D), target=param(D))
    return Case(model, (torch.randn(20, D), torch.randint(0, 20, (2, 60))), {}, mse(torch.randn(20, D)))


@_case
def _point_cloud() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        return net.head(net.body(x.transpose(1, 2)).amax(-1))

    body = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, D, 1))
    return Case(Net(run, body=body, head=linear(D, 10)), (torch.randn(B, 40, 3),), {}, entropy(classes(B)))


@_case
def _interatomic_potential() -> Case:
    def run(net: Any, positions: Tensor, kinds: Tensor) -> Tensor:
        distance = (positions[:, :, None] - positions[:, None] + 1e-3).norm(dim=-1)
        basis = torch.exp(-4 * (distance[..., None] - torch.linspace(0, 3, 16)).square())
        pair = net.filter(basis) * net.kinds(kinds)[:, None]
        return net.out(pair.sum(2).tanh()).sum((1, 2))

    model = Net(run, filter=linear(16, D), kinds=nn.Embedding(5, D), out=linear(D, 1))
    return Case(model, (torch.randn(B, 6, 3), classes(B, 6, num=5)), {}, mse(torch.randn(B)))


# ------------------------------------------------------------------------------------------- recommenders, time, others


@_case
def _click_prediction() -> Case:
    def run(net: Any, dense: Tensor, sparse: Tensor) -> Tensor:
        every = torch.stack([net.dense(dense), *(table(sparse[:, i]) for i, table in enumerate(net.tables))], 1)
        pairs = torch.bmm(every, every.transpose(1, 2)).flatten(1)
        return net.top(torch.cat([pairs, every[:, 0]], -1)).squeeze(-1)

    model = Net(run, dense=linear(5, 8), tables=nn.ModuleList(nn.Embedding(20, 8) for _ in range(3)), top=linear(24, 1))
    target = torch.randint(0, 2, (B,)).float()
    inputs = torch.rand(B, 5) * 1000, torch.randint(0, 20, (B, 3))
    return Case(model, inputs, {}, lambda y: F.binary_cross_entropy_with_logits(y, target))


@_case
def _matrix_factorization() -> Case:
    def run(net: Any, user: Tensor, item: Tensor, rating: Tensor) -> Tensor:
        found = (net.users(user) * net.items(item)).sum(-1) + net.bias(item).squeeze(-1) + net.mean
        return F.huber_loss(found, rating)

    model = Net(run, users=nn.Embedding(20, 8), items=nn.Embedding(30, 8), bias=nn.Embedding(30, 1), mean=param(1))
    return Case(model, (classes(B), classes(B, num=30), torch.rand(B) * 5))


@_case
def _large_labels() -> Case:
    def run(net: Any, x: Tensor, labels: Tensor) -> Tensor:
        return (net.body(x).squeeze(-1) * 1e4 - labels).abs().mean() / 1e4

    return Case(
        Net(run, body=nn.Sequential(linear(), nn.ReLU(), linear(D, 1))), (torch.randn(B, D), torch.rand(B) * 12345.6)
    )


@_case
def _quantiles() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        return net.body(x) + 1000

    target, levels = 1000 + torch.randn(B, 1), torch.tensor([0.1, 0.5, 0.9])
    return Case(
        Net(run, body=linear(D, 3)),
        (torch.randn(B, D),),
        {},
        lambda y: torch.maximum(levels * (target - y), (levels - 1) * (target - y)).mean(),
    )


@_case
def _counted_mask() -> Case:
    def run(net: Any, x: Tensor, mask: Tensor) -> Tensor:
        last = mask.sum(1).long() - 1
        return net.body(x[torch.arange(B), last])

    mask = (torch.arange(600) < torch.randint(260, 600, (B, 1))).float()
    return Case(Net(run, body=linear(8, 4)), (torch.randn(B, 600, 8), mask), {}, mse(torch.randn(B, 4)))


@_case
def _reversible_scaling() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        mean, std = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-5
        y = net.body((x - mean) / std * net.weight + net.bias)
        return (y - net.bias) / (net.weight + 1e-5) * std + mean

    model = Net(run, weight=nn.Parameter(torch.ones(1)), bias=nn.Parameter(torch.zeros(1)), body=linear(24, 12))
    x = torch.randn(B, 24) * 10 + 500
    return Case(model, (x,), {}, lambda y: F.mse_loss(y, x[:, :12]) / 100)


@_case
def _one_hot_inputs() -> Case:
    def run(net: Any, board: Tensor) -> Tensor:
        return net.body(F.one_hot(board, 13).float().flatten(1))

    return Case(Net(run, body=linear(13 * 16, 10)), (classes(B, 16, num=13),), {}, entropy(classes(B)))


@_case
def _value_and_policy() -> Case:
    def run(net: Any, x: Tensor, advantage: Tensor, action: Tensor, old: Tensor, returns: Tensor) -> Tensor:
        hidden = net.body(x).tanh()
        log_prob = net.policy(hidden).log_softmax(-1).gather(1, action[:, None]).squeeze(1)
        ratio = (log_prob - old).exp()
        surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        return F.mse_loss(net.value(hidden).squeeze(-1), returns) - surrogate

    model = Net(run, body=linear(), policy=linear(D, 6), value=linear(D, 1))
    return Case(model, (torch.randn(B, D), torch.randn(B), classes(B, num=6), -torch.rand(B) - 1, torch.randn(B)))


@_case
def _weight_norm() -> Case:
    model = nn.Sequential(parametrizations.weight_norm(linear()), nn.ReLU(), parametrizations.weight_norm(linear(D, 4)))
    return Case(model, (torch.randn(B, D),), {}, mse(torch.randn(B, 4)))


@_case
def _orthogonal_weight() -> Case:
    model = nn.Sequential(parametrizations.orthogonal(linear(), orthogonal_map="matrix_exp"), nn.Tanh(), linear(D, 4))
    return Case(model, (torch.randn(B, D),), {}, mse(torch.randn(B, 4)))


@_case
def _standardized_weights() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        weight = net.conv.weight
        weight = (weight - weight.mean((1, 2, 3), keepdim=True)) / (weight.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, weight, net.conv.bias).mean((2, 3))

    return Case(Net(run, conv=nn.Conv2d(3, 8, 3)), (images(),), {}, mse(torch.randn(B, 8)))


@_case
def _capsules() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        votes = torch.einsum("bid,iode->bioe", x.view(B, 4, 8), net.weight)
        logits = torch.zeros(B, 4, 5)
        for _ in range(2):
            summed = (logits.softmax(-1)[..., None] * votes).sum(1)
            squares = summed.square().sum(-1, keepdim=True)
            out = summed * squares / (1 + squares) / (squares + 1e-8).sqrt()
            logits = logits + (votes * out[:, None]).sum(-1)
        return out.norm(dim=-1)

    return Case(Net(run, weight=param(4, 5, 8, 8, scale=0.3)), (torch.randn(B, D),), {}, mse(torch.rand(B, 5)))


@_case
def _splines() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        basis = torch.exp(-((x[..., None] - net.grid) ** 2) * 4)
        return net.base(F.silu(x)) + torch.einsum("big,iog->bo", basis, net.weight)

    model = Net(run, base=linear(), weight=param(D, D, 6))
    model.register_buffer("grid", torch.linspace(-1, 1, 6))
    return Case(model, (torch.randn(B, D),), {}, mse(torch.randn(B, D)))


@_case
def _differentiable_solver() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        matrix = net.factor @ net.factor.T + torch.eye(D)
        return torch.linalg.solve(matrix.float(), net.body(x).float().T).T

    return Case(Net(run, factor=param(D, D), body=linear()), (torch.randn(B, D),), {}, mse(torch.randn(B, D)))


@_case
def _latent_array() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        latent = net.cross(net.latents.expand(B, -1, -1), x, x, need_weights=False)[0]
        return net.head((latent + net.mlp(net.norm(latent))).mean(1))

    model = Net(
        run,
        latents=param(1, 4, D),
        cross=nn.MultiheadAttention(D, 4, batch_first=True),
        norm=nn.LayerNorm(D),
        mlp=linear(),
        head=linear(D, 10),
    )
    return Case(model, (torch.randn(B, 20, D),), {}, entropy(classes(B)))


@_case
def _sets() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        return net.outer(net.inner(x).relu().sum(1))

    return Case(Net(run, inner=linear(3), outer=linear(D, 1)), (torch.rand(B, 50, 3),), {}, mse(torch.rand(B, 1)))


@_case
def _squeeze_and_excitation() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        y = net.conv(x)
        return (y * net.up(net.down(y.mean((2, 3))).relu()).sigmoid()[:, :, None, None]).mean((2, 3))

    return Case(
        Net(run, conv=nn.Conv2d(3, 8, 3), down=linear(8, 2), up=linear(2, 8)), (images(),), {}, mse(torch.randn(B, 8))
    )


@_case
def _gated_product() -> Case:
    def run(net: Any, a: Tensor, b: Tensor) -> Tensor:
        return net.act(net.bilinear(a, b))

    return Case(
        Net(run, bilinear=nn.Bilinear(8, 8, 16), act=nn.PReLU(16)),
        (torch.randn(B, 8), torch.randn(B, 8)),
        {},
        mse(torch.randn(B, 16)),
    )


@_case
def _knowledge_distillation() -> Case:
    def run(net: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            taught = net.teacher(x).softmax(-1)
        return F.kl_div(net.student(x).log_softmax(-1), taught, reduction="batchmean")

    model = Net(run, teacher=linear(D, 10), student=linear(D, 10))
    model.teacher.requires_grad_(False)
    return Case(model, (torch.randn(B, D),))
