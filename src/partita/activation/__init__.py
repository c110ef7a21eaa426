"""Memory that the forward keeps for the backward: recomputation, offload, partitioning, chunks. Knows no optimizer."""
