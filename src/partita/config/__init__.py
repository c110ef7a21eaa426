"""The configuration: its schema, its sources, and its resolution for a number of ranks."""
