"""Weights in the layout of Hugging Face: read into an engine, and written by one or out of a checkpoint."""
