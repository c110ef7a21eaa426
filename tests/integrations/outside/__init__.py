"""Plugins of pytest's: other libraries' own tests on partita (``benchmarks/results/outside.md``)."""
