"""Tensor, sequence and pipeline parallelism of unmodified models. Knows no units and no optimizer."""
