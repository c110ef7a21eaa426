"""The planner: a model's units on paper, and the memory, time and traffic that they need, before anything runs."""
