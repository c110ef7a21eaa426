"""Integrations with other libraries: each translates their calls to the engine, and needs an optional extra."""
