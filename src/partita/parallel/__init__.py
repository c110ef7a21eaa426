"""Axes beside data: tensor, sequence and pipeline, each applied to an unmodified model."""
