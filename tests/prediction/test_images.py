"""Times of convolutions, batch norms and pooling are predicted from measurements of these kinds of jobs."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from partita.config.resolve import resolve
from partita.config.schema import Config
from partita.layout.units import group_units
from partita.prediction.curve import Curve
from partita.prediction.machine import Machine, machine_of, plain_machine
from partita.prediction.model_source import ModelSource
from partita.prediction.rank_model import trace_rank
from partita.prediction.step_cost import StepCost
from partita.prediction.trace.block_trace import Work
from partita.table.mesh_shape import MeshShape

SAMPLES, CHANNELS, WIDTH = 2, 8, 8
STANDS = {
    "convolution": "product",
    "convolution_backward": "product",
    "batch_norm": "function",
    "batch_norm_backward": "function",
    "pool": "element",
}


class Scale(nn.Module):
    """A layer with a parameter, so that the images require a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(1))

    def forward(self, images: Tensor) -> Tensor:
        return images * self.by


def jobs_of(*layers: nn.Module, shape: tuple[int, ...] = (CHANNELS, WIDTH, WIDTH)) -> Counter[tuple[str, int]]:
    """Return the jobs of a forward and a backward through ``layers`` on images of this shape."""

    def batch(samples: int, device: torch.device) -> tuple[Tensor]:
        return (torch.zeros(samples, *shape, device=device),)

    model = nn.Sequential(*layers)
    rank_model = trace_rank(
        ModelSource("images", model, batch), group_units(model), resolve(Config(), 1, "cpu"), ("none",), SAMPLES
    )
    trace, jobs = rank_model.traces["none"], Counter[tuple[str, int]]()
    for block_trace in (trace.prologue, *trace.blocks, trace.epilogue):
        jobs += block_trace.forward.jobs + block_trace.backward.jobs
    return jobs


def sizes(jobs: Counter[tuple[str, int]], kind: str) -> list[int]:
    return [size for each, size in jobs.elements() if each == kind]


FLOPS = 2 * SAMPLES * WIDTH**2
CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "plain": (lambda: nn.Conv2d(8, 16, 3, padding=1), FLOPS * 16 * 8 * 9),
    "in groups": (lambda: nn.Conv2d(8, 16, 3, padding=1, groups=4), FLOPS * 16 * 2 * 9),
    "of each channel": (lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8), FLOPS * 8 * 9),
    "strided": (lambda: nn.Conv2d(8, 16, 2, stride=2), FLOPS // 4 * 16 * 8 * 4),
    "transposed": (lambda: nn.ConvTranspose2d(8, 16, 2, stride=2), FLOPS * 16 * 8 * 4),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_is_one_job_forward_and_one_of_twice_its_size_backward(name: str) -> None:
    make, flops = CONVOLUTIONS[name]
    jobs = jobs_of(Scale(), make())
    assert sizes(jobs, "convolution") == [flops]
    assert sizes(jobs, "convolution_backward") == [2 * flops]
    assert not sizes(jobs, "product")
    first = jobs_of(make())
    assert sizes(first, "convolution_backward") == [flops], "nobody asks for the gradient of what a model is given"


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(4)])
def test_batch_norms_and_pools_are_kinds_of_their_own(pool: nn.Module) -> None:
    jobs = jobs_of(Scale(), nn.BatchNorm2d(CHANNELS), pool, nn.LayerNorm(4))
    assert [len(sizes(jobs, kind)) for kind in ("batch_norm", "batch_norm_backward", "pool")] == [1, 1, 1]
    assert len(sizes(jobs, "function")) == 2  # the layer norm


@pytest.mark.parametrize(("layer", "kind"), [(nn.Hardtanh(), "element"), (nn.Tanh(), "function")])
def test_straight_pieces_are_no_functions(layer: nn.Module, kind: str) -> None:
    of_nothing, jobs = jobs_of(Scale(), nn.Identity()), jobs_of(Scale(), layer)
    assert {each for each, _ in (jobs - of_nothing).elements()} == {kind}


def machine(**seconds: float) -> Machine:
    """Return a machine on which a job of each kind takes the given seconds, independent of its size."""
    figures = dict.fromkeys(("memory", "tflops", "tflops_fp32", "memory_rate", "node_link", "host_memory"), 1.0)
    figures |= dict.fromkeys(("host_link", "network", "host_rate", "disk", "disk_rate"), 1.0)
    curves = tuple((kind, Curve(((1e18, of_job),))) for kind, of_job in seconds.items())
    return Machine("mine", 1, curves=curves, **figures)


def seconds(machine: Machine, jobs: Counter[tuple[str, int]]) -> float:
    return StepCost(machine, 1, "fp32").seconds(Work(jobs=jobs), MeshShape())


@pytest.mark.parametrize("kind", STANDS)
def test_in_a_file_without_a_kind_another_stands_for_it(kind: str) -> None:
    plain = {"product": 2.0, "function": 3.0, "element": 5.0}
    earlier = machine_of(plain_machine(machine(**plain)))
    assert seconds(earlier, Counter({(kind, 100): 1})) == plain[STANDS[kind]]
    assert seconds(machine(**plain, **{kind: 7.0}), Counter({(kind, 100): 1})) == 7.0


def test_a_step_follows_its_convolutions_where_products_stay_as_fast() -> None:
    jobs = jobs_of(Scale(), nn.Conv2d(CHANNELS, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 4))
    slow, fast = (
        seconds(machine(product=1.0, element=1.0, convolution=each, convolution_backward=3 * each), jobs)
        for each in (2.0, 1.0)
    )
    assert slow - fast == pytest.approx(2 * (1 + 3))
