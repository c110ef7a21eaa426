"""The ready-made trainer: a job file in; metrics, a plot, a sample and trained weights out."""
