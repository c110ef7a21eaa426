"""Hugging Face's Accelerator and Trainer on partita, beside the plain ones."""
