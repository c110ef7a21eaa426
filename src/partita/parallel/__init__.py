"""Parallel axes other than data: tensor, sequence and pipeline, each applied to an unmodified model."""
