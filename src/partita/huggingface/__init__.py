"""Hugging Face weights: read into an engine, and exported from an engine or a checkpoint."""
