"""Simulation of a cluster with the real engine: the memory and the traffic of each rank."""
