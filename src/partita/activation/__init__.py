"""What is kept of the forward for the backward."""
