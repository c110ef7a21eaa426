"""The calls of a training loop, and what an engine is built from."""
