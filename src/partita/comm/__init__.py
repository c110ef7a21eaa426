"""Communication between ranks: the mesh of process groups, its collectives, and counters of the bytes they send."""
