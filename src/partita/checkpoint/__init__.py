"""Whole tensors again: looking at states by name, and weights in files."""
