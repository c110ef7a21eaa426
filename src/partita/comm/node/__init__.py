"""Ranks of one node read each other's memory: who may, how they find each other, and what forked children let go of."""
