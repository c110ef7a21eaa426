"""Cases that are predicted and measured: models x stages x offload x precision x ranks x axes x activations."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

GPT = "layers=4,hidden=256,heads=4,vocab=1024,context=128"
WIDE = "layers=2,hidden=512,heads=8,vocab=4096,context=64"
LLAMA = "family=llama,layers=4,hidden=256,heads=8,kv_heads=4,ffn=512,vocab=1024,context=128"
CONVOLUTIONS = "benchmarks._predicted_cases:convolutions"
NAMES = {GPT: "GPT 256", WIDE: "GPT 512", LLAMA: "Llama 256", CONVOLUTIONS: "ResNet"}
MICRO = 4

HOST, DISK = ({"parameters": tier, "optimizer": tier} for tier in ("host", "disk"))
BF16 = {"compute": "bf16"}
LEAN = {"compute": "bf16", "master": "split", "moments": "int8"}


@dataclass(frozen=True)
class Case:
    """A ``model`` (as for ``partita plan``) under a ``config`` on a number of ranks."""

    model: str
    what: str
    ranks: int
    config: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{NAMES[self.model]}, {self.ranks} x {self.what}"

    @property
    def timed(self) -> bool:
        """True if the case computes in fp32 without a disk, with one core per rank (of two)."""
        offload = self.config["zero"].get("offload")
        exact = self.config.get("precision", {}).get("compute", "fp32") == "fp32"
        return self.ranks <= 2 and exact and offload is None


def cases() -> list[Case]:
    found = [Case(model, what, ranks, _full(config)) for model, what, ranks, config in _listed()]
    assert len({case.name for case in found}) == len(found)
    return found


def _full(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "batch": {"micro": MICRO, **config.get("batch", {})}}


def _listed() -> Iterator[tuple[str, str, int, dict[str, Any]]]:
    def zero(stage: int, **more: Any) -> dict[str, Any]:
        return {"zero": {"stage": stage, **more}}

    for stage in range(4):
        for ranks in (1, 2, 4):
            yield GPT, f"stage {stage}", ranks, zero(stage)
        for name, precision in (("fp32", {}), ("bf16", BF16)):
            yield LLAMA, f"stage {stage}, {name}", 2, {**zero(stage), "precision": precision}
        yield CONVOLUTIONS, f"stage {stage}", 2, zero(stage)
        yield WIDE, f"stage {stage}", 2, zero(stage)
    yield WIDE, "stage 0", 1, zero(0)
    yield LLAMA, "stage 0", 1, zero(0)
    for stage in (1, 3):
        for ranks in (2, 4):
            yield GPT, f"stage {stage}, states on the host", ranks, zero(stage, offload=HOST)
            yield GPT, f"stage {stage}, states on disk", ranks, zero(stage, offload=DISK)
            yield GPT, f"stage {stage}, tensor 2", ranks, {**zero(stage), "parallel": {"tensor": 2}}
            yield LLAMA, f"stage {stage}, sequence 2", ranks, {**zero(stage), "parallel": {"sequence": 2}}
        for model in (GPT, LLAMA):
            for kept in ("units", "selective"):
                yield (
                    model,
                    f"stage {stage}, {kept} recomputed",
                    2,
                    {**zero(stage), "activations": {"checkpoint": kept}},
                )
    for stage in (0, 1):
        for ranks in (2, 4):
            split = {"parallel": {"pipeline": 2}, "batch": {"accumulate": 4}}
            yield GPT, f"stage {stage}, pipeline 2", ranks, {**zero(stage), **split}
    both = {"parallel": {"pipeline": 2, "tensor": 2}, "batch": {"accumulate": 4}}
    yield GPT, "stage 0, pipeline 2, tensor 2", 4, {**zero(0), **both}
    for stage in (2, 3):
        for ranks in (2, 4):
            yield LLAMA, f"stage {stage}, lean", ranks, {**zero(stage), "precision": LEAN}
            wires = {"gradients": "int8"} | ({"parameters": "int8"} if stage == 3 else {})
            yield GPT, f"stage {stage}, int8 wires", ranks, {**zero(stage), "communication": wires}
        yield GPT, f"stage {stage}, 3 micro-batches", 2, {**zero(stage), "batch": {"accumulate": 3}}
    yield GPT, "stage 1, 3 micro-batches", 2, {**zero(1), "batch": {"accumulate": 3}}
    yield GPT, "stage 3, kept", 2, zero(3, keep_gathered=True)
    yield LLAMA, "stage 3, bf16, updates in backward", 2, {**zero(3), "precision": {**BF16, "gradients": "in_backward"}}


class Residual(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.second(torch.relu(self.first(x)))
        return out


class Classifier(nn.Module):
    """A classifier of images ``[batch, 3, 32, 32]``. Its loss is the mean square of ten scores, without labels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 48, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(48) for _ in range(4))
        self.head = nn.Linear(48, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3))).square().mean()  # type: ignore[no-any-return]


def convolutions() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model, and the arguments of its forward for one sample, as ``partita plan`` expects."""
    return Classifier(), {"images": torch.zeros(1, 3, 32, 32)}
