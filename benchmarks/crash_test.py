"""Survival of training: SIGKILL of a random rank at a random moment, in training and in saving, many times.

    python -m benchmarks.crash_test            # 200 kills
    python -m benchmarks.crash_test --quick    # 5 kills
    python -m benchmarks.crash_test --save     # into benchmarks/results/crash_test.md

It ends with status 1 if a checkpoint that a kill leaves does not verify, or does not resume with losses bitwise equal
to those of a run without kills. The runs are those of tests/checkpoint/crashes.py.
"""

import random
import sys
import tempfile
from pathlib import Path

from benchmarks._common import Report, parser
from tests.checkpoint import crashes
from tests.kit.ranks import close_pool, on_ranks

KILLS, QUICK_KILLS = 200, 5
TEXT = """Two ranks train a small model and save every third step, mostly in the background. A random one of them is
killed (SIGKILL) at a random moment of the first {longest} s; the next run resumes from the newest checkpoint, at
another stage and tier. After each kill, every visible checkpoint is verified, and every loss is compared bitwise with
that of a run without kills. Seed {seed}."""


def main() -> int:
    options = parser("Kills", (2,)).parse_args()
    report, seed = Report("Crashes"), random.randrange(2**32)
    report.begin()
    report.write(TEXT.format(longest=crashes.LONGEST_S, seed=seed))
    report.write()
    chance, found, wrong = random.Random(seed), list[crashes.Killed](), 0
    expected = on_ranks(crashes.RANKS, crashes.uninterrupted, 20_000 if not options.quick else 1000, timeout=600)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(QUICK_KILLS if options.quick else KILLS):
            try:
                found.append(crashes.kill_once(Path(folder), number, expected, chance))
            except Exception as error:
                wrong += 1
                report.expect(False, f"kill {number}: {error}")
    close_pool()
    saving = sum(killed.while_saving for killed in found)
    rows = [
        ["kills", str(len(found) + wrong)],
        ["of them while a checkpoint was written", str(saving)],
        ["of rank 0, of rank 1", f"{sum(not k.rank for k in found)}, {sum(k.rank for k in found)}"],
        ["steps done in all", str(found[-1].newest) if found else "0"],
        ["torn or lost checkpoints, other losses", str(wrong)],
    ]
    report.table(["", ""], rows)
    report.expect(bool(saving) or options.quick, "no kill met a save")
    return report.end(options.save)


if __name__ == "__main__":
    sys.exit(main())
