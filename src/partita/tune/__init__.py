"""A plan refined by short measured trials."""
