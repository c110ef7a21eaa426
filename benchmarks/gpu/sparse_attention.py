"""Block-sparse attention on one GPU: python -m benchmarks.gpu.sparse_attention --save

1. every pattern by FlexAttention against dense attention under the same mask, in fp32: outputs and gradients, odd
   lengths, grouped heads, padding, packed documents;
2. forward and backward in bf16 from 4k to 128k positions, compared with torch's dense causal attention.

`--quick` runs a part of it, on the CPU if there is no GPU.
"""

import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._common import Report
from benchmarks.gpu._common import device_here, is_tiny, parser, place
from partita.attention import Layout, block_sparse
from partita.attention.block_pairs import block_pairs
from partita.attention.picture import dense_pairs
from partita.attention.segments import Segments, Sizes, documents_of, whole_samples
from partita.memory import accelerator

BLOCK = 128
PATTERNS: dict[str, Layout] = {
    "sliding": Layout("sliding", BLOCK, 300),
    "longformer": Layout("longformer", BLOCK, 256, num_global=1),
    "bigbird": Layout("bigbird", BLOCK, 200, num_global=1, num_random=2),
    "fixed": Layout("fixed", BLOCK, 512, num_global=1),
    "variable": Layout("variable", BLOCK, (100, 300), num_global=1),
    "user": Layout("user", BLOCK, rows=tuple(f"1{row % 2}0000{row // 2 % 2}1" for row in range(8))),
    "longformer, both ways": Layout("longformer", BLOCK, 256, num_global=1, causal=False),
    "dense": Layout("dense", BLOCK),
}
TOLERANCE = 1e-5
SPEED_LENGTHS = (4096, 16384, 65536, 131072)
HEADS, KEY_HEADS, WIDTH, WINDOW = 32, 8, 128, 1024
REPEATS = 5


def main() -> int:
    options = parser(__doc__).parse_args()
    device = device_here(options)
    report = Report("Block-sparse attention on one GPU")
    report.begin()
    report.write(place(device))
    report.write()
    torch.backends.cuda.matmul.allow_tf32 = False
    length = 300 if is_tiny(options) else 1000
    report.table(["pattern", "batch", "worst difference", "allowed"], _exactness(report, device, length))
    lengths = (128,) if is_tiny(options) else SPEED_LENGTHS
    report.write(f"{HEADS} heads, {KEY_HEADS} of keys, of width {WIDTH}; a window of {WINDOW}, one global block; bf16.")
    report.write()
    header = ["positions", "dense, ms", "sparse, ms", "x dense's speed", "pairs, x fewer", "TFLOP/s"]
    report.table(header, _times(device, lengths))
    return report.end(options.save)


def _batches(length: int, device: torch.device) -> dict[str, tuple[dict[str, Tensor], Callable[[Sizes], Segments]]]:
    """Return batches of two samples by name: the arguments that describe each, and its segments."""
    seen = torch.ones(2, length, dtype=torch.bool)
    seen[0, length // 3 * 2 :] = False
    documents = torch.stack([torch.arange(length) // 150, torch.arange(length) // 211])
    return {
        "whole": ({}, whole_samples),
        "padded": ({"seen": seen.to(device)}, lambda sizes: whole_samples(sizes, seen)),
        "packed": ({"documents": documents.to(device)}, lambda sizes: documents_of(sizes, documents)),
    }


def _exactness(report: Report, device: torch.device, length: int) -> Iterator[list[str]]:
    torch.manual_seed(0)
    sizes = Sizes(2, length, length)
    sample, query, key = torch.meshgrid(*(torch.arange(n) for n in (2, length, length)), indexing="ij")
    for name, layout in PATTERNS.items():
        for batch, (said, segments) in _batches(length, device).items():
            found = block_pairs(layout, sizes, segments(sizes), said["seen"].cpu() if "seen" in said else None)
            mask = found.mask_function(sample, query, key)[:, None].to(device)
            shapes = ((2, 4, length, 64), (2, 2, length, 64), (2, 2, length, 64))
            given = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
            weights = torch.randn(shapes[0], device=device)
            mine = block_sparse(*given, layout, **said)
            some = mask.any(-1, keepdim=True)
            q, k, v = given
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            scores = (q @ k.mT / 8).masked_fill(~(mask | ~some), -torch.inf)
            theirs = scores.softmax(-1) @ v * some
            pairs = zip(
                (mine, *torch.autograd.grad(mine, given, weights)),
                (theirs, *torch.autograd.grad(theirs, given, weights)),
                strict=True,
            )
            worst = max(((a - b).abs().max() / b.abs().max().clamp(min=1)).item() for a, b in pairs)
            report.expect(worst <= TOLERANCE, f"{name}, {batch}: {worst:.1e} from dense attention")
            yield [name, batch, f"{worst:.1e}", f"{TOLERANCE:.0e}"]


def _times(device: torch.device, lengths: tuple[int, ...]) -> Iterator[list[str]]:
    layout = Layout("longformer", BLOCK, WINDOW, num_global=1)
    for length in lengths:
        shapes = ((1, HEADS, length, WIDTH), *[(1, KEY_HEADS, length, WIDTH)] * 2)
        given = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        weights = torch.randn_like(given[0])
        dense = _milliseconds(
            lambda given=given: F.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True), given, weights
        )
        sparse = _milliseconds(lambda given=given: block_sparse(*given, layout), given, weights)
        sizes = Sizes(1, length, length)
        pairs = len(block_pairs(layout, sizes, whole_samples(sizes)).row) * BLOCK**2
        flops = 14 * pairs * HEADS * WIDTH  # two products forward, five backward
        fewer = dense_pairs(True, length) / pairs
        cells = [
            f"{dense:.2f}",
            f"{sparse:.2f}",
            f"{dense / sparse:.1f}",
            f"{fewer:.1f}",
            f"{flops / sparse / 1e9:.0f}",
        ]
        yield [str(length), *cells]


def _milliseconds(call: Callable[[], Tensor], given: list[Tensor], weights: Tensor) -> float:
    """Return the best time of several calls, forward and backward."""
    best = float("inf")
    for _ in range(REPEATS + 1):
        accelerator.wait_for_all(weights.device)
        start = time.perf_counter()
        torch.autograd.grad(call(), given, weights)
        accelerator.wait_for_all(weights.device)
        best = min(best, time.perf_counter() - start)
    return best * 1e3


if __name__ == "__main__":
    sys.exit(main())
