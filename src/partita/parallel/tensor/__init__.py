"""Tensor parallelism: each rank has slices of a layer's matrices and computes a slice or summand of its output."""
