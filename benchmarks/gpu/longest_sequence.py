"""The longest sequence with which a decoder of 8 billion parameters trains on this card, by what forward stores:

    python -m benchmarks.gpu.longest_sequence --save

The batch is one sample, whose length doubles until memory or time runs out. The leanest states are used, on the host,
so that the device's memory holds only activations. TFLOP/s count dense attention's arithmetic for every mode.
"""

import sys

from benchmarks._common import Report
from benchmarks.gpu._common import SMALL, Clock, Job, attempt, chosen, device_here, host_bytes, is_tiny, parser, place
from benchmarks.gpu._modes import LONG_MODES
from partita.train.decoder import DecoderShape

LLAMA_8B = DecoderShape(32, 4096, 32, 8, 14336, vocab=128256)
LENGTHS = tuple(2**power for power in range(13, 21))
QUICK_LENGTHS = (64, 128)
STEPS = 1


def main() -> int:
    arguments = parser(__doc__).parse_args()
    device, host, clock = device_here(arguments), host_bytes(arguments), Clock(arguments.seconds)
    shape, lengths = (SMALL, QUICK_LENGTHS) if is_tiny(arguments) else (LLAMA_8B, LENGTHS)
    modes = chosen(arguments.mode, list(LONG_MODES))
    report = Report("The longest sequence")
    report.begin()
    report.write(place(device))
    report.write()

    def row_of(number: int, mode: str) -> list[str]:
        job = Job(mode, shape, lengths, max(lengths), STEPS, path=arguments.path, simulated=arguments.simulated)
        outcome = attempt(job, clock.left / (len(modes) - number), host)
        report.expect(bool(outcome.steps), f"{mode} trains at {lengths[0]} positions: {outcome.why}")
        if outcome.stopped == "error":
            print(outcome.said, file=sys.stderr)
        if not outcome.steps:
            return [mode, "-", outcome.why, "-", "-", "-"]
        last = outcome.steps[-1]
        why = outcome.why or "the longest that was tried"
        seconds, peak = min(last["times_s"][1:]), last["device_peak"] / 2**30
        return [mode, str(last["tokens"]), why, f"{peak:.1f}", f"{seconds:.1f}", f"{last['tflops']:.0f}"]

    header = ["kept of the forward", "longest", "what stopped it", "device GiB", "s a step", "TFLOP/s"]
    report.table(header, (row_of(number, mode) for number, mode in enumerate(modes)))
    return report.end(arguments.save)


if __name__ == "__main__":
    sys.exit(main())
