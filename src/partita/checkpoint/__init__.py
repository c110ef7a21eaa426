"""Checkpoints: states in global coordinates, which load under any other plan. Knows no ZeRO stage."""
