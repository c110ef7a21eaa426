"""Owners of matrices under Muon: how even their work is, and the bytes that a rank sends, computed from the layout.

    python -m benchmarks.owners           # Llama-3-8B, Llama-3-70B and Qwen3-30B-A3B on 8 to 512 ranks
    python -m benchmarks.owners --quick   # one model
    python -m benchmarks.owners --save    # into benchmarks/results/owners.md

Nothing is trained. It ends with status 1 if the most loaded owner has more than 1.1 times the mean where no single
parameter is more than its share.
"""

import sys
from collections.abc import Iterator

from benchmarks._common import Report, opened
