"""Muon, and optimizers that need full parameters: bytes and time of a step, compared with DeepSpeed's Muon.

    python -m benchmarks.matrix_optimizers            # 2 and 4 ranks
    python -m benchmarks.matrix_optimizers --quick    # 2 ranks, a small model
    python -m benchmarks.matrix_optimizers --save     # into benchmarks/results/matrix_optimizers.md

DeepSpeed's modes run if it is installed. It ends with status 1 if a target is missed: at stage 3 on 4 ranks, Muon sends
at most 2.7 elements for each parameter and rank.
"""

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence

from benchmarks._common import Report, Run, opened, run
from benchmarks._modes import MATRIX_OPTIMIZERS, deepspeed_is_here
from benchmarks._work import Work

BASES = {stage: f"partita {stage}, over the network" for stage in (1, 3)}
WORK = Work(layers=4, width=256, heads=4, ffn_width=704, steps=6, warmup=2)
QUICK_WORK = Work(layers=2, width=128, heads=4, ffn_width=352, steps=4, warmup=2)
FP32_BYTES = 4
# Elements for each parameter and rank.
MOST_SENT = {(4, "partita 3, Muon"): 2.7}


def main() -> int:
    report, options = opened("Matrix optimizers", (2, 4), reps=3)
    work, worlds = (QUICK_WORK, [2]) if options.quick else (WORK, options.ranks)
    modes = [mode for mode in (*BASES.values(), *MATRIX_OPTIMIZERS) if deepspeed_is_here() or "DeepSpeed" not in mode]
    report.write(_TEXT.format(num_reps=options.reps))
    report.write()
    header = ["ranks", "mode", "sent / P", "ms per step", "x AdamW", "smallest - largest", "Newton-Schulz"]
    rows = (row for world in worlds for row in _rows(report, world, work, options.only or modes, options.reps))
    report.table(header, rows)
    return report.end(options.save)


_TEXT = """*sent / P*: bytes of the loopback interface in a step, per rank, in units of the bytes of all P parameters in
fp32. *x AdamW*: a step's time in units of partita's step with AdamW at the same stage in the same repetition, median of
{num_reps}; all modes send over the network interface. *Newton-Schulz*: its share of a step, on the rank where it takes
longest. DeepSpeed runs with `gradient_clipping: 0`, and without compiling its Newton-Schulz iteration, which takes
minutes on these cores."""


def _rows(report: Report, world: int, work: Work, modes: Sequence[str], num_reps: int) -> Iterator[list[str]]:
    runs = defaultdict[str, list[Run]](list)
    for rep in range(num_reps):
        for mode in modes if rep % 2 == 0 else modes[::-1]:
            runs[mode].append(run(mode, world, work))
    for mode in modes:
        num_bytes = FP32_BYTES * runs[mode][0].ranks[0]["num_params"]
        sent = statistics.median(float(each.ranks[0]["interface_bytes_a_step"]) for each in runs[mode])
        sent /= num_bytes * world
        base = BASES[3 if " 3" in mode else 1]
        ratios = [own.step_s / other.step_s for own, other in zip(runs[mode], runs[base], strict=False)]
        share = [max(rank.get("newton_schulz_s", 0.0) for rank in each.ranks) / each.step_s for each in runs[mode]]
        cells = [str(world), mode, f"{sent:.2f}", f"{1e3 * statistics.median(each.step_s for each in runs[mode]):.0f}"]
        cells += [f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} - {max(ratios):.2f}"] if ratios else ["", ""]
        cells.append(f"{statistics.median(share):.0%}" if any(share) else "")
        if (most := MOST_SENT.get((world, mode))) is not None:
            report.expect(sent <= most, f"{mode} on {world} ranks sends {sent:.2f} P per rank, not {most}")
        yield cells


if __name__ == "__main__":
    sys.exit(main())
