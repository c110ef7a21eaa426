"""Compare gradients in 16 bits with those of fp32, for small models of many fields, under autocast and the engine.

    python -m benchmarks.precision_zoo            # every model in each mode: a few minutes
    python -m benchmarks.precision_zoo --quick    # every 20th model
    python -m benchmarks.precision_zoo --save     # into benchmarks/results/precision_zoo.md

Models run on the GPU if there is one.

It ends with status 1 if a model trains under autocast but not under the engine's default, or if its gradients are
farther from those of fp32 than 1.5 times autocast's with the same 16-bit parameters.
"""

import sys

import torch

from benchmarks import _zoo
from benchmarks._common import Report, parser

TEXT = """One forward and backward in bf16 {device}; *1 - cosine* of all gradients with those of fp32. *autocast*:
`torch.autocast`, fp32 parameters; *rounded*: the same with parameters rounded to bf16, as 16-bit storage does; *mixed*
(the default), *cast*: `precision.mode`. Only models whose figures under `mixed` are above 1.5 times those of autocast
plus 1e-6, or that fail to train in a mode, have a row."""
MODES = ("mixed", "cast")


def main() -> int:
    made = parser("Precision of many models", ())
    options = made.parse_args()
    torch.set_num_threads(1)
    report = Report("Precision of many models")
    report.begin()
    where = torch.cuda.get_device_name() if _zoo.DEVICE.type == "cuda" else "the CPU"
    report.write(TEXT.format(device=f"on {where}, torch {torch.__version__}"))
    report.write()
    names = list(_zoo.models())[:: 20 if options.quick else 1]
    rows, trained = list[list[str]](), dict.fromkeys(("autocast", *MODES), 0)
    for name in names:
        autocast, rounded = _zoo.autocast_of(name), _zoo.autocast_of(name, rounded=True)
        found = {mode: _zoo.engine_of(name, 0, mode=mode) for mode in MODES}
        for way, result in {"autocast": autocast, **found}.items():
            trained[way] += not result.problem
        mixed = found["mixed"]
        holds = _zoo.is_close(mixed, autocast) or _zoo.is_close(mixed, rounded)
        report.expect(holds, f"{name}: {mixed.problem or f'{mixed.distance:.1e}'}, autocast {autocast.distance:.1e}")
        results = [autocast, rounded, *found.values()]
        if not _zoo.is_close(mixed, autocast) or any(result.problem for result in results):
            rows.append([name, *(_shown(result) for result in results)])
    report.table(["model", "autocast", "rounded", *MODES], rows)
    totals = ", ".join(f"{way}: {num}" for way, num in trained.items())
    report.write(f"Of {len(names)} models, so many train under {totals}.")
    report.write()
    return report.end(options.save, "gpu_precision_zoo" if _zoo.DEVICE.type == "cuda" else None)


def _shown(result: _zoo.Found) -> str:
    return result.problem.replace("|", "/")[:80] if result.problem else f"{result.distance:.1e}"


if __name__ == "__main__":
    sys.exit(main())
