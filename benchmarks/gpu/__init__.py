"""Benchmarks that need a CUDA GPU: correctness first, then figures."""
