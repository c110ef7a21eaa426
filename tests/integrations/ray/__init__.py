"""Ray Train on partita."""
