"""Unsharded tensors by name, assembled from what the ranks hold."""
