"""Figures of the ZeRO papers, compared with those of the state table and the search."""

from collections.abc import Iterator
from dataclasses import dataclass

from partita.config.messages import format_bytes
from partita.layout.state_bytes import model_state_bytes
from partita.prediction.machine import machine_named
from partita.prediction.plan import Plan, format_shortfall, plan
from partita.prediction.search import Forecast
from partita.table.mesh_shape import MeshShape
from partita.table.planned import PlannedSegment, PlannedUnit
from partita.table.residence import BF16, INT8, SPLIT
from partita.table.span import Entry, build_layout
from partita.table.state_plan import Encodings, further_stages, preset

# "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, table 1: model states of a GPU in GB, by
# data-parallel GPUs, at stages 1, 2 and 3 for 7.5B parameters, for 128B, and for 1T.
SIZES = (7.5e9, 128e9, 1e12)
STATES_GB = {
    1: ((120, 120, 120), (2048, 2048, 2048), (16000, 16000, 16000)),
    4: ((52.5, 41.3, 30), (896, 704, 512), (7000, 5500, 4000)),
    16: ((35.6, 21.6, 7.5), (608, 368, 128), (4750, 2875, 1000)),
    64: ((31.4, 16.6, 1.88), (536, 284, 32), (4187, 2218, 250)),
    256: ((30.4, 15.4, 0.47), (518, 263, 8), (4046, 2054, 62.5)),
    1024: ((30.1, 15.1, 0.12), (513, 257, 2), (4011, 2013, 15.6)),
}
MIXED = Encodings(compute=BF16, gradients=BF16)
LEAN = Encodings(compute=BF16, master=SPLIT, gradients=BF16, moments=INT8)


@dataclass(frozen=True)
class Row:
    """One comparison: the papers' claim, the result here, the result with lean states, and why they differ."""

    case: str
    claimed: str
    ours: str
    lean: str
    why: str = ""


def state_bytes(num_params: float, data: int, name: str, encodings: Encodings) -> int:
    """Return the bytes of model states on the fullest of ``data`` ranks under the preset called ``name``."""
    mesh = MeshShape(data=data)
    size = 2**16  # elements per row: few, so that padding is small
    layouts = build_layout([Entry("weight", (int(num_params) // size, size), encodings.compute, True)], data)
    unit = PlannedUnit("", tuple(PlannedSegment(layout, preset(name, encodings), mesh) for layout in layouts))
    return sum(model_state_bytes([unit], 0).values())


def state_rows() -> Iterator[Row]:
    """Yield the papers' table of bytes by data-parallel degree, for the three stages."""
    for data, of_sizes in STATES_GB.items():
        for num_params, claimed in zip(SIZES, of_sizes, strict=True):
            for (stage, name), figure in zip(further_stages("ddp"), claimed, strict=True):
                ours, lean = (state_bytes(num_params, data, name, e) for e in (MIXED, LEAN))
                yield Row(
                    f"{num_params / 1e9:g}B, {data} GPUs, stage {stage}",
                    format_bytes(figure * 1e9),
                    format_bytes(ours),
                    format_bytes(lean),
                )


# (preset, GPUs, claim, state setting of the claim or "" for the fastest exact one, reason for a different result here)
_KERNELS = "attention keeps no scores, and activations may be recomputed"
REACH = (
    ("gpt-1.4b", 1, "data parallelism: out of memory", "stage 1, fp16 gradients", f"16P are 22.7 GB; {_KERNELS}"),
    ("gpt-6b", 64, "fits with ZeRO-1", "stage 1, fp16 gradients", ""),
    ("gpt-13b", 64, "fits with ZeRO-2", "stage 2, fp16 gradients", ""),
    ("turing-nlg-17b", 256, "fits with ZeRO and tensor parallelism", "", ""),
    ("gpt-40b", 1, "fits with ZeRO-3 Offload and 1.5 TB of host memory", "", ""),
    ("gpt-170b", 400, "fits with ZeRO-2 and tensor parallelism, 38 TFLOP/s", "", f"a predicted rate; {_KERNELS}"),
    ("gpt-1t", 800, "fits with 3D parallelism", "", ""),
    ("gpt-2t", 512, "fits with ZeRO-3 Offload", "", ""),
)


def reach_rows() -> Iterator[Row]:
    """Yield the papers' claims about models on V100s with 32 GB."""
    machine = machine_named("v100-32", disk=0)
    for model, gpus, claimed, way, why in REACH:
        found = plan(model, gpus=gpus, gpu=machine)
        of_way = [each for each in found.best_per_state_settings if each.settings.states.name == way]
        exact = of_way or [each for each in found.best_per_state_settings if "lean" not in each.settings.states.name]
        lean = [each for each in found.best_per_state_settings if "lean" in each.settings.states.name]
        yield Row(f"{model}, {gpus} x V100-32", claimed, _shown(found, exact), _shown(found, lean), why)


def _shown(found: Plan, forecasts: list[Forecast]) -> str:
    if not forecasts:
        return "not weighed: plans that need less memory away from the GPU fit"
    best = forecasts[0]
    settings = best.settings
    mesh = f"{settings.mesh.data} x {settings.mesh.tensor} x {settings.mesh.pipeline}"
    if best.time is None:
        return f"{settings.states.name}: {format_shortfall(best)}"
    flops = 6 * found.source.num_params * found.samples * (found.source.context or 1)
    rate = flops / best.time.total_s / found.num_gpus / 1e12
    return f"fits: {settings.states.name}, data x tensor x pipeline {mesh}, {rate:.0f} TFLOP/s per GPU"
