"""The engine: the calls of a training loop, and the parts that an engine is built from."""
