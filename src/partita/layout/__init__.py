"""The planner: a model's units, and the memory, time and traffic that they need, before anything is allocated."""
