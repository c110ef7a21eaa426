"""Tests of Lightning's Trainer and Fabric on partita, compared with Lightning's own DDP."""
