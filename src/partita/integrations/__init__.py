"""Optional package: other libraries' trainers on the engine. Each translates calls, and needs an extra."""
