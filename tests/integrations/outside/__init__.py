"""pytest plugins with which other libraries' own tests run unmodified on partita (``benchmarks/results/outside.md``)."""
