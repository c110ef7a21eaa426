"""Sharding at run time: units of parameters, their unsharding and resharding, and the reduction of gradients."""
