"""Checkpoints: what is saved, in global coordinates, and loaded under any other plan."""
