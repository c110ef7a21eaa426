"""Reporting of a training run: rows of metrics, a plot of the losses, live progress."""
