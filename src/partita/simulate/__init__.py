"""Simulation of a cluster with the real engine: the memory that a rank holds, and the messages that it sends."""
