"""Plugin that runs DeepSpeed's own scheduler tests on partita, from an unmodified checkout of DeepSpeed:

``python -m pytest -p tests.integrations.outside.deepspeed --noconftest --import-mode=importlib -c /dev/null
DEEPSPEED/tests/unit/runtime/test_lr_schedulers.py``

It makes ``deepspeed`` an alias of ``partita.integrations.deepspeed``, and provides other modules of the tests.
"""

import sys
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import partita.integrations.deepspeed as deepspeed
from partita.integrations.deepspeed.unsupported import missing

SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


def refusing(name: str) -> type:
    """Return a substitute for a DeepSpeed class that partita lacks. Its constructor raises the error that users get."""

    def refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise missing("deepspeed", "runtime", deepspeed.elsewhere.MODULE)

    return type(name, (), {"__init__": refuse})


class Names(ModuleType):
    """Substitute for ``deepspeed.runtime.lr_schedules``. Its constants are DeepSpeed's configuration keys."""

    VALID_LR_SCHEDULES = SCHEDULES
    WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"

    def __getattr__(self, name: str) -> Any:
        kinds = {_constant(kind): kind for kind in SCHEDULES}
        if name.isupper():
            return kinds.get(name, name.lower())
        if name in SCHEDULES:
            setattr(self, name, refusing(name))
            return getattr(self, name)
        raise AttributeError(name)


def _constant(kind: str) -> str:
    """Return the constant of a schedule: ``WARMUP_DECAY_LR`` for ``WarmupDecayLR``."""
    words = kind.replace("LR", "Lr")
    return "".join(f"_{letter}" if letter.isupper() else letter for letter in words).strip("_").upper()


class SimpleModel(nn.Module):
    """One linear layer with a cross-entropy loss."""

    def __init__(self, hidden_dim: int, empty_grad: bool = False) -> None:
        super().__init__()
        assert not empty_grad
        self.linear = nn.Linear(hidden_dim, hidden_dim)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.linear(x), y)


def random_dataloader(
    model: Any, total_samples: int, hidden_dim: int, device: torch.device, dtype: torch.dtype
) -> DataLoader[Any]:
    """Return a loader of micro-batches with random features and classes."""
    features = torch.randn(total_samples, hidden_dim, device=device, dtype=dtype)
    classes = torch.randint(hidden_dim, (total_samples,), device=device)
    return DataLoader(TensorDataset(features, classes), batch_size=model.train_micro_batch_size_per_gpu())


class DistributedTest:
    """Base class of these tests, which all run in one process."""


def put(name: str, **content: Any) -> None:
    module = sys.modules.setdefault(name, ModuleType(name))
    module.__dict__.update(content)


def pytest_configure() -> None:
    sys.modules["deepspeed"] = deepspeed
    schedules = sys.modules["deepspeed.runtime.lr_schedules"] = Names("deepspeed.runtime.lr_schedules")
    put("deepspeed.runtime", lr_schedules=schedules)
    put("unit")
    put("unit.common", DistributedTest=DistributedTest)
    put("unit.simple_model", SimpleModel=SimpleModel, random_dataloader=random_dataloader)
