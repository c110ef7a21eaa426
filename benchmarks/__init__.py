"""One script a question; each prints its answer, and has a `--quick` form."""

import os

# The random numbers of the models that benchmarks and tests share are the same in every run, and in both of two.
os.environ.setdefault("PARTITA_TEST_SEED", "0")
