"""The examples for clusters and notebooks, run with what their surroundings would tell them."""
