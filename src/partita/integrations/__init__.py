"""Integrations with other libraries. Each translates the library's calls to the engine, and needs an optional extra."""
