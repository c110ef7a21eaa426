"""Sequence parallelism: from the first to the last block, each rank has a slice of every sample's positions."""
