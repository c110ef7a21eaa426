"""Model-TFLOP/s of decoders from 1B to 40B at 4k to 32k tokens a step: python -m benchmarks.gpu.model_tflops --save

The count is 6 operations per parameter and token plus those of causal attention. The recomputation of every block in
backward (torch's checkpointing, in all modes) is not counted. The figure is of the best step after the first; updates
that overlap with a forward are in the next step's time.

Predicted floor: a step takes at least its operations at the rate of the matrix units, counted 4/3 times because of
recomputation. With states on the host, its backward takes at least the gradients' bytes over the link, and its forward
at least the bytes of the update (28 per parameter; lean 12) over the host's memory bandwidth.
"""

import sys
from collections.abc import Iterator

from benchmarks._common import Report
from benchmarks.gpu._common import (
    SIZES,
    SMALL,
    Clock,
    Job,
    Outcome,
    attempt,
    chosen,
    device_here,
    host_bytes,
    is_tiny,
    num_params,
    parser,
    place,
)
from benchmarks.gpu._modes import MODES
from partita.train.decoder import DecoderShape

CHOSEN = [
    "plain PyTorch",
    "FSDP2",
    "default",
    "none",
    "lean, none",
    "optimizer on host",
    "everything on host",
    "lean, everything on host",
    "FSDP2, CPUOffloadPolicy",
]
TOKENS = (16384, 4096, 32768, 8192)  # the most interesting first
LENGTH = 4096
# The most valuable first.
ORDER = ["7B", "13B", "3B", "28B", "40B", "1B"]


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--size", nargs="+", default=None, choices=list(SIZES), help="the sizes to run")
    made.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="tokens a step, in the order to run")
    arguments = made.parse_args()
    device, tiny = device_here(arguments), is_tiny(arguments)
    host, clock = host_bytes(arguments), Clock(arguments.seconds)
    shapes = {"tiny": SMALL} if tiny else {size: SIZES[size] for size in arguments.size or ORDER}
    tokens, length = ((128, 64), 64) if tiny else (tuple(arguments.tokens), LENGTH)
    modes = chosen(arguments.mode, list(MODES)) if arguments.mode else CHOSEN
    report = Report("Model-TFLOP/s by size, mode and tokens a step")
    report.begin()
    report.write(place(device))
    report.write()
    sizes = ", ".join(f"{size} {num_params(shape) / 1e9:.3g}e9" for size, shape in shapes.items())
    report.write(f"Parameters: {sizes}")
    report.write()
    header = ["size", "mode", "tokens", "model-TFLOP/s", "of the first mode", "GiB device + host", "stopped by"]

    def job(mode: str, shape: DecoderShape) -> Job:
        return Job(mode, shape, tokens, length, path=arguments.path, simulated=arguments.simulated)

    def rows() -> Iterator[list[str]]:
        for size, shape in shapes.items():
            base: dict[int, float] = {}
            for mode in modes:
                if clock.left < 30:
                    yield [size, mode, "-", "-", "-", "-", "not begun: time"]
                    continue
                outcome = attempt(job(mode, shape), clock.left, host)
                yield from of_attempt(outcome, size, mode, base)
                if outcome.stopped:
                    last = str(tokens[len(outcome.steps)]) if len(outcome.steps) < len(tokens) else "-"
                    yield [size, mode, last, "-", "-", "-", outcome.why]
                    report.expect(
                        outcome.stopped in ("device", "host", "time", "absent"), f"{size}, {mode}: {outcome.why}"
                    )

    report.table(header, rows())
    return report.end(arguments.save)


def of_attempt(outcome: Outcome, size: str, mode: str, base: dict[int, float]) -> Iterator[list[str]]:
    """Yield a row for each number of tokens; ``base`` has the rates of the first mode that ran."""
    for step in outcome.steps:
        num, rate = step["tokens"], step["tflops"]
        ratio = f"{rate / base.setdefault(num, rate):.2f}"
        peak = f"{step['device_peak'] / 2**30:.1f} + {outcome.host_peak / 2**30:.1f}"
        yield [size, mode, str(num), f"{rate:.4g}", ratio, peak, ""]


if __name__ == "__main__":
    sys.exit(main())
