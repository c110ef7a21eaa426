"""The engine: the calls of a training loop, and the construction of all parts. Knows no prediction and no integration."""
