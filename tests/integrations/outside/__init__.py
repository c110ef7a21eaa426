"""Pytest plugins that run other libraries' own tests on partita (``benchmarks/results/outside.md``)."""
