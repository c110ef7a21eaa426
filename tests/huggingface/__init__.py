"""Tests of weights in files that need one process."""
