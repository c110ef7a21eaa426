"""Forecasts of training before it runs: memory, traffic and time, from a machine and a model without weights."""
