"""Every GPU benchmark in one call, the most valuable figures first: python -m benchmarks.gpu.all --seconds 580

Correctness, then speed at 7B, the largest model of the leanest mode, the timeline, then everything else for as long as
there is time. A script that misses a target does not keep the others from running. `--quick` runs each in its quick
form, on the CPU where there is no GPU. On a machine where partita is not installed, `make kernels PYTHON=python3` and
`PYTHONPATH=src` come first.
"""

import argparse
import subprocess
import sys
import time

from benchmarks._common import ROOT

# Script, arguments, and the share of the time that is left which it may take.
PLAN: list[tuple[str, list[str], float]] = [
    ("offload_check", [], 0.3),
    ("model_tflops", ["--size", "7B", "--tokens", "16384"], 0.4),
    ("largest_model", ["--mode", "lean, everything on host"], 0.5),
    ("timeline", [], 0.4),
    ("sparse_attention", [], 0.4),
    ("longest_sequence", [], 0.4),
    ("check", [], 0.4),
    ("largest_model", [], 0.6),
    ("model_tflops", [], 1.0),
]
LEAST_S = 45.0


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="each script in its quick form")
    made.add_argument("--save", action="store_true", help="write the reports into benchmarks/results/")
    made.add_argument("--seconds", type=float, default=580.0)
    arguments = made.parse_args()
    end, failed, seen = time.monotonic() + arguments.seconds, [], set[str]()
    for script, options, share in PLAN:
        left = end - time.monotonic()
        if left < LEAST_S or (arguments.quick and script in seen):
            continue
        seen.add(script)
        given = ["--quick"] if arguments.quick else options
        flags = ["--save"] * arguments.save if script != "check" else []
        budget = [] if script in ("check", "offload_check") else ["--seconds", f"{left * share:.0f}"]
        command = [sys.executable, "-m", f"benchmarks.gpu.{script}", *given, *budget, *flags]
        print(f"\n== {' '.join(command[1:])}", flush=True)
        try:
            status = subprocess.run(command, cwd=ROOT, timeout=left, check=False).returncode
        except subprocess.TimeoutExpired:
            status = 124
        if status:
            failed.append(f"{script} ({status})")
    print(f"\nfailed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
