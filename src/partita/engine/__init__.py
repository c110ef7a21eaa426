"""The engine: the calls of a training loop, and the construction of its parts. Knows no prediction or integration."""
