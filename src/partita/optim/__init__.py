"""The optimizer step: any elementwise torch optimizer, run on what this rank owns of each parameter."""
