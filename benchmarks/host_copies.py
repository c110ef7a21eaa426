"""Copies on the host: the ranks of a node together store each state once, not once per rank, at startup and during
training.

    python -m benchmarks.host_copies            # 200M parameters on 1, 2 and 4 ranks: 6 GB must be free
    python -m benchmarks.host_copies --quick    # 1 and 2 ranks, a small model, no target
    python -m benchmarks.host_copies --save     # into benchmarks/results/host_copies.md

It ends with status 1 if the target is missed: the peak resident memory of all ranks together, above that of the
imports, at most 1.2 times one rank's.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors.torch import save_file

from benchmarks._common import Report, megabytes, parser, run
from benchmarks._work import Work
from partita.huggingface.weights import INDEX

MODES = ("partita 3, on host, from meta", "partita 3, on host, from files")
WORK = Work(layers=60, width=512, heads=8, ffn_width=1408, batch=4, sequence=16, steps=3, warmup=1)
QUICK_WORK = Work(layers=6, width=128, heads=4, ffn_width=352, batch=4, sequence=16, steps=3, warmup=1)
TARGET = 1.2


def main() -> int:
    options = parser("Memory of the host", (1, 2, 4)).parse_args()
    work = QUICK_WORK if options.quick else WORK
    worlds = [1, 2] if options.quick else options.ranks
    report = Report("Host copies")
    report.begin()
    num_params = sum(param.numel() for param in work.build("meta").parameters())
    report.write(_TEXT.format(millions=num_params / 1e6))
    report.write()
    header = ["start", "ranks", "states on host MB", "buffers MB", "resident MB", "x 1 rank", "target"]
    with tempfile.TemporaryDirectory() as folder:
        _write_files(work, Path(folder))
        report.table(header, _rows(report, worlds, work, Path(folder), options.only or MODES, options.quick))
    return report.end(options.save)


_TEXT = """A decoder of {millions:.1f}M parameters in fp32 with AdamW, stage 3, parameters, gradients and moments on
the host. It is built on the meta device, and starts with random values or with those of safetensors files. Figures are
sums over the ranks. *states on host*: their peak in the ledger; *buffers*: memory of gathered parameters and of
gradients that are being reduced, which every rank needs; *resident*: the peak of each process's resident memory, start
included, above its memory before the model was built."""


def _write_files(work: Work, folder: Path) -> None:
    """Write the model to a few files, with their index."""
    weights = list(work.build().state_dict().items())
    num_each = -(-len(weights) // 3)
    where = dict[str, str]()
    for number in range(0, len(weights), num_each):
        part, name = dict(weights[number : number + num_each]), f"part-{number}.safetensors"
        save_file(part, folder / name)
        where |= dict.fromkeys(part, name)
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))


def _rows(
    report: Report, worlds: Sequence[int], work: Work, folder: Path, modes: Sequence[str], quick: bool
) -> Iterator[list[str]]:
    for mode in modes:
        alone = 0.0
        for world in worlds:
            result = run(mode, world, work, folder=folder)
            host = sum(sum(num for name, num in rank["held_bytes"].items() if "host" in name) for rank in result.ranks)
            resident = sum(float(rank["peak_bytes"] - rank["imported_bytes"]) for rank in result.ranks)
            alone = alone or resident
            if not quick:
                report.expect(resident <= TARGET * alone, f"{mode}, {world} ranks: {resident / alone:.2f} x one rank")
            yield [
                *(mode.rpartition(", ")[2], str(world), megabytes(host), megabytes(result.total("buffer_bytes"))),
                *(megabytes(resident), f"{resident / alone:.2f}", "" if quick or world == 1 else f"<= {TARGET}"),
            ]


if __name__ == "__main__":
    sys.exit(main())
