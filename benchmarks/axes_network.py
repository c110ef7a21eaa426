"""Choice of the axis that crosses a slow network: bytes and time of a step, predicted from the sizes of the layers and
measured.

    python -m benchmarks.axes_network            # two hosts of two ranks, at 1 Gbit/s and 100 Mbit/s: 8 minutes
    python -m benchmarks.axes_network --quick    # a small model at 1 Gbit/s: does it run?
    python -m benchmarks.axes_network --save     # into benchmarks/results/axes_network.md

Hosts are those of ``benchmarks.network``. The same four ranks form different meshes: one axis is between the hosts, the
other one within them. Run nothing else at the same time. It ends with status 1 if a prediction fails.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from benchmarks._common import Report, Run, check_losses, megabytes, opened, run
from benchmarks._network import joined_hosts
from benchmarks._work import Work
from partita.table.across_nodes import crossing_tokens, sent_elements

HOSTS, RANKS = 2, 4
ELEMENT_BYTES = 4
WORK = Work(layers=8, width=240, heads=8, ffn_width=640, sequence=60)
QUICK_WORK = Work(layers=2, width=96, heads=4, ffn_width=256, sequence=24)
LINES = {"1 Gbit/s": ("1gbit", 1e9, 9), "100 Mbit/s": ("100mbit", 100e6, 4)}  # tc's name, bits per second, steps
# Tokens per replica (of two), in units of the width: below and above the number at which tensor sends as much as data.
BELOW, ABOVE = 1, 6
BYTES_TOLERANCE = 0.15  # embedding, head, norms, control messages and headers are not predicted
FAR = 1.5  # a mesh that sends this many times more bytes must take longer


@dataclass(frozen=True)
class Cut:
    """A mesh whose ``axis`` is between the hosts.

    Attributes:
        mode: the training mode.
        shared: the number of ranks on a host that share a layer's parameters.
        is_dealt: consecutive ranks are on different hosts, so that the innermost axis is between the hosts.
    """

    mode: str
    axis: str
    shared: int = 1
    is_dealt: bool = False

    def host_bytes(self, work: Work, tokens: int) -> float:
        """Return the bytes that a host sends in a step for the layers, with ``tokens`` in each of two replicas."""
        layers = 1 if self.axis == "pipeline" else work.layers
        elements = sent_elements(self.axis, HOSTS, tokens, work.width) * layers / self.shared
        # One host sends activations forward over the edge, the other one gradients back.
        return elements * ELEMENT_BYTES * (RANKS // HOSTS) / (2 if self.axis == "pipeline" else 1)


CUTS = {
    "tensor across, data within": Cut("partita tensor 2 x data, stage 1", "tensor", is_dealt=True),
    "data across, tensor within": Cut("partita tensor 2 x data, stage 1", "data", shared=2),
    "data alone": Cut("partita 1", "data"),
    "pipeline across, data within": Cut("partita pipeline 2 x data, stage 1", "pipeline"),
}


def main() -> int:
    report, options = opened("Axes across a network", reps=1)
    work = QUICK_WORK if options.quick else WORK
    report.write(_TEXT.format(width=work.width, crossing=crossing_tokens(1), reps=options.reps))
    report.write()
    header = ["line", "tokens per replica", "what crosses", "predicted MB", "s on the line", "MB sent", "s a step"]
    lines = ["1 Gbit/s"] if options.quick else list(LINES)
    report.table(header, (row for line in lines for row in _rows(report, line, work, options.reps, options.quick)))
    return report.end(options.save)


_TEXT = """Per host and step. A layer of width H = {width} has 12 H^2 parameters, and T are the tokens of each of two
replicas in a step. *Predicted*: for the layers only, 4 T H elements per layer and rank with tensor across, 12 H^2 with
data across (half of it if two tensor ranks share the layer), and T H on each edge of a pipeline. So tensor sends more
than data alone above T = {crossing} H, and more than data with tensor inside above half of that. Figures are of the
repetition, of {reps}, with the shortest median step."""


def _rows(report: Report, line: str, work: Work, num_reps: int, quick: bool) -> Iterator[list[str]]:
    rate, bits_a_s, steps = LINES[line]
    for widths in (BELOW,) if quick else (BELOW, ABOVE):
        tokens = widths * work.width
        sized = replace(work, batch=2 * tokens // work.sequence, steps=4 if quick else steps, warmup=1)
        predicted = {name: cut.host_bytes(sized, tokens) for name, cut in CUTS.items()}
        runs = {name: [_run(cut, sized, rate) for _ in range(num_reps)] for name, cut in CUTS.items()}
        check_losses({name: own[-1] for name, own in runs.items()}, "data alone")
        sent = {name: float(own[0].ranks[0]["interface_bytes_a_step"]) for name, own in runs.items()}
        step_s = {name: min(one.step_s for one in own) for name, own in runs.items()}
        for name in () if quick else CUTS:
            off = abs(sent[name] / predicted[name] - 1)
            report.expect(off <= BYTES_TOLERANCE, f"{line}, {tokens} tokens, {name}: bytes {off:.0%} off")
        for one, other in () if quick else combinations(CUTS, 2):
            less, more = sorted((one, other), key=predicted.__getitem__)
            if predicted[more] >= FAR * predicted[less]:
                holds = step_s[more] > step_s[less]
                report.expect(holds, f"{line}, {tokens} tokens: '{more}' should take longer than '{less}'")
        for name in CUTS:
            yield [
                *(line, f"{tokens} ({widths} H)", name, megabytes(predicted[name])),
                *(f"{predicted[name] * 8 / bits_a_s:.2f}", megabytes(sent[name]), f"{step_s[name]:.2f}"),
            ]


def _run(cut: Cut, work: Work, rate: str) -> Run:
    with joined_hosts(HOSTS, rate) as hosts:
        done = run(cut.mode, RANKS, work, hosts=replace(hosts, is_dealt=cut.is_dealt))
    print(f"  {rate}, {cut.mode} along {cut.axis}: {done.step_s * 1e3:.0f} ms", file=sys.stderr, flush=True)
    return done


if __name__ == "__main__":
    sys.exit(main())
