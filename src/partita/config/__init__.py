"""The configuration: its schema, where it is read from, and what it means on a number of ranks."""
