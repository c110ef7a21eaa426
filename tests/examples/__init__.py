"""Tests of the examples for clusters and notebooks, run with the environment variables that a cluster would set."""
