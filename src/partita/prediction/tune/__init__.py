"""Short measured trials that refine a plan."""
