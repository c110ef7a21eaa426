"""Between ranks: the mesh of process groups, the collectives, and what they moved."""
