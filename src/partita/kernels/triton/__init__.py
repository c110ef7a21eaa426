"""Updates on an accelerator as one Triton kernel each, where Triton is installed. It comes with torch for CUDA."""
