"""ARCHITECTURE.md lists the files that parameters, gradients and micro-batches pass through, as traced in a step."""

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partita
from tests.kit.ranks import on_ranks

SOURCE = Path(partita.__file__).parent
ARCHITECTURE = Path(__file__).parents[2] / "ARCHITECTURE.md"
WIDTH, NUM_BLOCKS, TRACED_STEP = 64, 4, 2
BASE = {"communication": {"within_node": "network"}, "batch": {"accumulate": 1}}
# Excluded from traces: the state table, events, devices, the schedule, and the diagnosis of ranks that wait.
EVERYWHERE = (
    *(
        "table/",
        "errors.py",
        "optim/schedule.py",
        *(f"memory/{name}.py" for name in ("streams", "tiers", "timeline", "accelerator")),
    ),
    *(f"comm/{name}.py" for name in ("watchdog", "stall", "blocked")),
)


class Trace:
    """Profiler that records the package's files while it is on, in the order of their first calls."""

    def __init__(self) -> None:
        self.files = dict[str, None]()
        self.is_on = False
        self.ends_in_forward = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if self.is_on and event == "call" and path.is_relative_to(SOURCE):
            name = path.relative_to(SOURCE).as_posix()
            if not name.startswith(EVERYWHERE):
                self.files[name] = None

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """Trace this thread, and threads that start in the block."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]


class Block(nn.Module):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.trace = trace

    def forward(self, x: Tensor) -> Tensor:
        self.trace.is_on &= not self.trace.ends_in_forward  # its parameters are unsharded now
        return x + torch.relu(self.linear(x))


def traced(config: dict[str, Any], part: str) -> list[str]:
    """Return the files of one part of a step: a unit's unshard, gradients in backward, the update, or a full batch."""
    trace = Trace()
    model = nn.Sequential(*(Block(trace) for _ in range(NUM_BLOCKS)))
    trace.ends_in_forward = part == "unshard"
    now = ""  # the part to trace in this step

    def after(module: nn.Module, args: object, output: object) -> None:
        trace.is_on = bool(now)

    torch.manual_seed(0)
    initialize = partita.initialize  # the import of the package is not traced
    with trace.everywhere(), initialize(model, BASE | config, loss_fn=loss) as engine:
        if part == "unshard":
            model[0].register_forward_hook(after)  # runs after the engine's own hooks
        for step in range(TRACED_STEP + 1):
            now = part if step == TRACED_STEP else ""
            x = torch.randn(4, WIDTH)
            if part == "batch":
                trace.is_on = bool(now)
                engine.train_batch(iter([x] * 2))
                continue
            output = engine(x)
            if now == "backward":
                output.register_hook(lambda grad: setattr(trace, "is_on", True))
            engine.backward(loss(output, x))
            engine._parts.runtime.reducer.drain()  # reductions may run in another thread
            trace.is_on = now == "update"
            engine.step()
            if now == "update":  # the next use of the weights would wait for them
                engine._parts.updater.wait_for_updates()
            trace.is_on = False
        trace.is_on = False
    return list(trace.files)


def loss(output: Tensor, batch: object) -> Tensor:
    return output.square().mean()


def listed(title: str) -> list[str]:
    """Return the files that ARCHITECTURE.md lists below a title."""
    section = ARCHITECTURE.read_text().split(f"\n**{title}**", 1)[1].split("\n\n", 1)[0]
    return [f"{name}.py" for name in re.findall(r"`([a-z_0-9]+/[a-z_0-9/]+)`", section)]


def of_folders(files: list[str], *folders: str) -> list[str]:
    return [name.removesuffix(".py") for name in files if name.startswith(folders)]


UPDATE = ("optim/", "sharding/publish", "sharding/interpreter")
SHARED = ("sharding/", "comm/", "memory/buffer_pool")
INT4 = {"zero": {"stage": 2}, "communication": {"gradients": "int4", "within_node": "network"}}
HOST = {"stage": 2, "offload": {"optimizer": "host"}}
# For each journey: the config, the part of the step, and the folders (or files) that are compared.
JOURNEYS: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "An unshard": ({"zero": {"stage": 3, "prefetch_bytes": 0}}, "unshard", SHARED),
    "A gradient to its sum": ({"zero": {"stage": 2}}, "backward", SHARED),
    "A sum to the updated weight": ({"zero": {"stage": 2}}, "update", UPDATE),
    "An int4 gradient": (INT4, "backward", ("compression/", "kernels/codec")),
    "An update off the device": ({"zero": HOST}, "update", (*UPDATE, "sharding/unit.py")),
    "A micro-batch in a pipeline": ({"parallel": {"pipeline": 2}}, "batch", ("parallel/pipeline/", "engine/")),
}


@pytest.mark.parametrize("title", JOURNEYS)
def test_files_are_those_listed(title: str) -> None:
    config, part, folders = JOURNEYS[title]
    files = [of_folders(each, *folders) for each in on_ranks(2, traced, config, part)]
    crossed = sorted({name for each in files for name in each})
    assert crossed == sorted(of_folders(listed(title), *folders)), files[0]
