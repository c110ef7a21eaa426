"""The loss that lean states cost: the job of `make train` with default states, and with each kind of lean states.

    python -m benchmarks.lean_states            # the job of `make train` three times: about six minutes
    python -m benchmarks.lean_states --bf16     # three times more, with split masters; hours on a CPU without bf16
    python -m benchmarks.lean_states --quick    # 20 steps each, no target
    python -m benchmarks.lean_states --save     # into benchmarks/results/lean_states.md

It ends with status 1 if the target is missed: a final held-out loss at most 1 % above that of default states with the
same compute dtype.
"""

import sys

from benchmarks._common import ROOT, Report, parser
from benchmarks._job import JOB, run_job

TARGET = 0.01
# States by compute dtype; the first ones are the reference.
STATES: dict[str, dict[str, dict[str, str]]] = {
    "fp32": {
        "classic": {},
        "8-bit moments": {"moments": "int8"},
        "the same, updated in backward": {"moments": "int8", "gradients": "in_backward"},
    },
    "bf16": {
        "classic": {},
        "split master, 8-bit moments": {"master": "split", "moments": "int8"},
        "the same, updated in backward": {"master": "split", "moments": "int8", "gradients": "in_backward"},
    },
}
TEXT = """The job of `make train` ({job}) on two processes under stage 3: the same
model, text, batches and rates, with other states. *Loss*: held-out loss at the end, in nats per byte; *bytes per
parameter*: of stored parameters, master weights, gradients (fp32) and moments. Updates in backward clip each unit's
gradient."""


def main() -> int:
    made = parser("Loss with lean states", (2,))
    made.add_argument("--bf16", action="store_true", help="bf16 compute, too")
    options = made.parse_args()
    report = Report("Lean states")
    report.begin()
    report.write(TEXT.format(job=JOB.relative_to(ROOT)))
    report.write()
    rows = []
    for compute in ("fp32", "bf16") if options.bf16 else ("fp32",):
        kinds = STATES[compute]
        classic = None
        for kind, precision in kinds.items():
            loss = held_out_loss({"compute": compute, **precision}, options.quick)
            classic = classic or loss
            difference = loss / classic - 1
            if not options.quick:
                report.expect(difference <= TARGET, f"{compute}, {kind}: {difference:+.2%} from classic states")
            num_bytes = bytes_a_parameter(compute, precision)
            rows.append([compute, kind, str(num_bytes), f"{loss:.4f}", f"{difference:+.2%}"])
    report.table(["compute", "states", "bytes per parameter", "loss", "from classic"], rows)
    return report.end(options.save)


def bytes_a_parameter(compute: str, precision: dict[str, str]) -> int:
    """Return the bytes per parameter, without the scales of 8-bit moments (1/32 byte)."""
    parameter, master = (4, 0) if compute == "fp32" else (2, 2 if precision.get("master") == "split" else 4)
    return parameter + master + 4 * ("gradients" not in precision) + (2 if "moments" in precision else 8)


def held_out_loss(precision: dict[str, str], quick: bool) -> float:
    """Return the held-out loss at the end of the job."""
    _, evaluations = run_job([f"engine.precision.{key}={value}" for key, value in precision.items()], quick=quick)
    return evaluations[-1].held_out_loss


if __name__ == "__main__":
    sys.exit(main())
