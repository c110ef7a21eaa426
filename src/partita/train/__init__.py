"""The ready-made trainer: reads a job file, and writes metrics, a plot, a sample and trained weights."""
