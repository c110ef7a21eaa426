"""The configuration: its schema, its sources, and its meaning on a number of ranks. Knows no model and no device."""
