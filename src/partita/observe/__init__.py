"""What a training run shows: rows of metrics, a plot of the losses, live progress."""
