"""Tests of Hugging Face's Accelerator and Trainer on partita, compared with the plain ones."""
