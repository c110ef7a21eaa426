"""Sequence parallelism: between its first and last block, each rank has a slice of every sample's positions."""
