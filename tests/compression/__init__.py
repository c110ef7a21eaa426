"""Tests of the pure arithmetic: no devices, no process groups."""
