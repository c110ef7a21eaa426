"""Tests of Ray Train on partita."""
