"""Tests of checkpoints that need one process."""
