"""Benchmarks: each script answers one question, prints the answer, and has a `--quick` form."""

import os

# Models shared with the tests have the same random numbers in every run, so that two runs can be compared.
os.environ.setdefault("PARTITA_TEST_SEED", "0")
