"""What needs a CUDA GPU: correctness first, then figures."""
