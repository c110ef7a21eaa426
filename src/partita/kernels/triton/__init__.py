"""Updates on an accelerator, each as one Triton kernel. Triton is optional; it comes with torch for CUDA."""
