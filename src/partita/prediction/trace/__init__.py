"""One forward and backward of a model on ``meta``: bytes, work and traffic of each block."""
