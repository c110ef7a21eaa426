"""Tuning: a plan, refined by short measured trials."""
