"""Tensor parallelism: each rank has slices of a layer's matrices and computes a part of its output."""
