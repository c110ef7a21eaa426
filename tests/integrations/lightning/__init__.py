"""Lightning's Trainer and Fabric on partita, beside its own DDP."""
