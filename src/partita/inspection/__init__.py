"""Whole tensors by name, put together from what the ranks hold."""
