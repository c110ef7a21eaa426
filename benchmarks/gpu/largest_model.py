"""The largest decoder that trains real steps on this card and host: python -m benchmarks.gpu.largest_model --save

For each mode, the number of layers of one width is found by bisection. Every attempt is a separate process, which is
killed before it exhausts the host's memory. The first guess follows from the bytes per parameter (predicted in the
table), so that few attempts are needed. Give `--mode` and `--seconds` to fit into a short command, and `--layers` to
try only one size.
"""

import math
import sys
from dataclasses import dataclass, field, replace

import torch

from benchmarks._common import Report
from benchmarks.gpu._common import (
    SMALL,
    Clock,
    Job,
    Outcome,
    attempt,
    chosen,
    decoder,
    device_here,
    host_bytes,
    is_tiny,
    num_params,
    parser,
    place,
)
from benchmarks.gpu._modes import MODES, Mode
from partita.memory import accelerator
from partita.train.decoder import DecoderShape

# 271 million parameters per layer.
WIDE = decoder(1, 5120, 13824)
# One warm-up step and one step, because the second one has all states. Sequences are short, so that states and not
# activations limit the size.
TOKENS, LENGTH, STEPS = 2048, 1024, 1
RESOLUTION = 0.05
QUICK = ["plain PyTorch", "FSDP2, CPUOffloadPolicy", "everything on host", "lean, optimizer on disk", "lean, auto"]
DEVICE_MARGIN = 3 * 2**30


@dataclass
class Search:
    """Bisection over the number of layers: ``fits`` is known to train, ``fails`` is known not to (None: unknown)."""

    mode: str
    shape: DecoderShape
    guess: int
    most: int
    fits: int = 0
    fails: int | None = None
    best: Outcome | None = None
    why: str = ""
    tried: list[int] = field(default_factory=list)

    @property
    def following(self) -> int | None:
        """The next number of layers to try."""
        if not self.tried:
            return self.guess
        if self.fails is None:
            return min(self.most, max(self.fits + 1, math.ceil(1.2 * self.fits))) if self.fits < self.most else None
        if self.fails - self.fits <= max(1, int(RESOLUTION * self.fits)):
            return None
        return (self.fits + self.fails) // 2

    def took(self, layers: int, outcome: Outcome) -> bool:
        """Record an outcome; return whether to continue."""
        self.tried.append(layers)
        if not outcome.stopped:
            self.fits, self.best = layers, outcome
            if layers == self.most:
                self.why = "the most that was requested"
            return True
        self.why = outcome.why
        if outcome.stopped in ("device", "host", "disk"):
            self.fails = layers
            return layers > 1
        return False

    def row(self) -> list[str]:
        trained = num_params(replace(self.shape, layers=self.fits)) / 1e9 if self.fits else 0.0
        predicted = num_params(replace(self.shape, layers=self.guess)) / 1e9
        row = [self.mode, f"{predicted:.3g}", f"{trained:.3g}", self.why]
        if self.best is None:
            return [*row, "-", "-", "-"]
        step = self.best.steps[-1]
        peaks = (step["device_peak"] / 2**30, self.best.host_peak / 2**30)
        return [*row, *(f"{peak:.1f}" for peak in peaks), f"{step['times_s'][-1]:.1f}"]


def guess(mode: Mode, shape: DecoderShape, device: torch.device, host: int) -> int:
    """Return the number of layers that should fit, from the bytes per parameter."""
    free = max(0, accelerator.free_bytes(device) - DEVICE_MARGIN)
    room = min(free / mode.device, host / mode.host if mode.host else math.inf)
    return max(1, int(room / num_params(shape)))


def search(one: Search, clock: Clock, host: int, path: str | None, *, simulated: bool) -> None:
    took = 0.0
    while (layers := one.following) is not None:
        if clock.left < max(30.0, 1.5 * took * layers / max(one.tried[-1:] or [layers])):
            one.why = one.why or "time"
            return
        shape = replace(one.shape, layers=layers)
        job = Job(one.mode, shape, (TOKENS,), LENGTH, STEPS, path=path, simulated=simulated)
        outcome = attempt(job, clock.left, host)
        took = outcome.seconds
        print(f"  {one.mode}: {layers} layers: {outcome.why or 'trains'} ({took:.0f} s)", file=sys.stderr, flush=True)
        if not one.took(layers, outcome):
            if outcome.stopped == "error":
                print(outcome.said, file=sys.stderr)
            return


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--layers", type=int, default=None, help="try this many layers, and no others")
    arguments = made.parse_args()
    device, tiny = device_here(arguments), is_tiny(arguments)
    host, clock = host_bytes(arguments), Clock(arguments.seconds)
    modes = chosen(arguments.mode or (QUICK if tiny else None), list(MODES))
    report = Report("The largest model that trains")
    report.begin()
    report.write(place(device) + f"; at most {host / 2**30:.0f} GiB of the host.")
    report.write()
    reached = dict[str, int]()

    def row_of(mode: str) -> list[str]:
        shape, most = (SMALL, 2) if tiny else (WIDE, 10_000)
        first = arguments.layers or (1 if device.type == "cpu" else min(most, guess(MODES[mode], shape, device, host)))
        one = Search(mode, shape, first, first if arguments.layers else most)
        search(one, clock, host, arguments.path, simulated=arguments.simulated)
        reached[mode] = one.fits
        report.expect(one.fits > 0 or one.why == "time" or one.why.startswith("absent"), f"{mode} trains: {one.why}")
        return one.row()

    header = ["mode", "10⁹ parameters, predicted", "trained", "what stopped it"]
    report.table([*header, "device GiB", "host GiB", "s a step"], map(row_of, modes))
    if tiny:
        guarded = attempt(Job(modes[0], SMALL, (64,), 64, simulated=arguments.simulated), 120, 2**24)
        report.expect(guarded.stopped == "host", f"an attempt is ended before it takes too much: {guarded.why}")
    compare(report, reached)
    return report.end(arguments.save)


def compare(report: Report, reached: dict[str, int]) -> None:
    """Compare partita's largest model with the others', in layers."""
    ours = max((num for mode, num in reached.items() if MODES[mode].config), default=0)
    for peer in (mode for mode in reached if not MODES[mode].config and reached[mode]):
        report.write(f"- the largest of partita's is {ours / reached[peer]:.2f} times that of {peer}")


if __name__ == "__main__":
    sys.exit(main())
