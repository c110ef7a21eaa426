"""Checkpoints: states saved in global coordinates, which can be loaded under any other plan."""
