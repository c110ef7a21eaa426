"""Metrics of a run: rows, sinks, plots, progress. Knows no engine."""
