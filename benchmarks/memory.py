"""Memory of a rank compared with DDP and FSDP2: model states by the ledger and by the plan, and resident memory.

    python -m benchmarks.memory            # 200M parameters on 4 ranks: 16 GB must be free
    python -m benchmarks.memory --quick    # 2 ranks, a small model
    python -m benchmarks.memory --save     # into benchmarks/results/memory.md

It ends with status 1 if a target is missed: model states equal to the plan, to the byte; resident memory above that of
the imports at most 0.35 times DDP's and FSDP2's at stage 3, and 0.75 times DDP's at stages 1 and 2 (no targets for the
small model).
"""

import sys
from collections.abc import Iterator, Sequence

from benchmarks._common import Report, Run, check_losses, megabytes, parser, run
from benchmarks._work import Work
from partita.memory.capacity import host_memory

MODES = (
    *("DDP", "FSDP2", "partita 0", "partita 1", "partita 2", "partita 3"),
    *("FSDP2, from meta", "partita 3, from meta"),
)
QUICK_MODES = ("DDP", "FSDP2", "partita 1", "partita 3")
WORK = Work(layers=28, width=768, heads=12, ffn_width=2048, batch=4, sequence=16, steps=4, warmup=2)
QUICK_WORK = Work(layers=4, width=256, heads=4, ffn_width=704, batch=4, sequence=16, steps=4, warmup=2)

# Targets, in units of the other libraries' resident memory for the same work.
TARGETS = {
    "partita 1": {"DDP": 0.75},
    "partita 2": {"DDP": 0.75},
    "partita 3": {"DDP": 0.35, "FSDP2": 0.35},
}
# Bytes per parameter on every rank in the mode that uses most, and bytes of a process without the model.
LARGEST_BYTES_A_PARAM, BYTES_A_PROCESS = 18, 500e6


def main() -> int:
    options = parser("The memory of a rank", (4,)).parse_args()
    work, modes = (QUICK_WORK, QUICK_MODES) if options.quick else (WORK, MODES)
    worlds = [2] if options.quick else options.ranks
    report = Report("Memory")
    report.begin()
    num_params = sum(param.numel() for param in work.build("meta").parameters())
    report.write(_TEXT.format(millions=num_params / 1e6))
    report.write()
    header = [
        "ranks",
        "mode",
        "states MB",
        "plan MB",
        "buffers MB",
        "resident MB",
        "steady MB",
        "x DDP",
        "x FSDP2",
        "target",
    ]
    rows = (row for world in worlds for row in _rows(report, world, work, options.only or modes, options.quick))
    report.table(header, rows)
    return report.end(options.save)


_TEXT = """A decoder of {millions:.1f}M parameters in fp32 with AdamW; short sequences, so that activations are small.
Every figure is of the rank where it is largest. *states*: the peak of parameters, gradients, master weights and
moments in the ledger; *plan*: the same, computed from the residence table. *buffers*: memory of gathered parameters
and of gradients that are being reduced. *resident*: peak of the process's resident memory over the complete run, start
included, above its memory before the model was built; *steady*: the same over the last steps. Every rank builds the
full model, or builds it on the meta device if the row says so."""


def _rows(report: Report, world: int, work: Work, modes: Sequence[str], quick: bool) -> Iterator[list[str]]:
    runs: dict[str, Run] = {}
    for mode in modes:
        _need_memory(mode, world, work)
        result = runs[mode] = run(mode, world, work)
        check_losses({name: one for name, one in runs.items() if "meta" not in name}, modes[0])
        cells = [str(world), mode, *[""] * 3, megabytes(result.work_bytes), megabytes(result.steady_work_bytes)]
        if "state_bytes" in result.ranks[0]:
            same = all(rank["state_bytes"] == rank["expected_state_bytes"] for rank in result.ranks)
            report.expect(same, f"{mode} on {world} ranks holds what the plan says")
            cells[2] = megabytes(max(sum(rank["state_bytes"].values()) for rank in result.ranks))
            cells[3] = megabytes(max(sum(rank["expected_state_bytes"].values()) for rank in result.ranks))
            cells[4] = megabytes(max(rank["buffer_bytes"] for rank in result.ranks))
        targets = {} if quick else TARGETS.get(mode, {})
        for peer in ("DDP", "FSDP2"):
            if peer not in runs:
                cells.append("")
                continue
            ratio = result.work_bytes / runs[peer].work_bytes
            cells.append(f"{ratio:.2f}")
            if peer in targets:
                report.expect(
                    ratio <= targets[peer], f"{mode} on {world} ranks: {ratio:.3f} x {peer}'s resident memory"
                )
        yield [*cells, ", ".join(f"<= {target:.2f} {peer}" for peer, target in targets.items())]


def _need_memory(mode: str, world: int, work: Work) -> None:
    """Check that the machine has enough free memory for the run.

    Raises:
        RuntimeError: too little memory is free.
    """
    num_params = sum(param.numel() for param in work.build("meta").parameters())
    needed, free = world * (LARGEST_BYTES_A_PARAM * num_params + BYTES_A_PROCESS), host_memory()[1]
    if needed > free:
        raise RuntimeError(f"{mode} on {world} ranks may need {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")


if __name__ == "__main__":
    sys.exit(main())
