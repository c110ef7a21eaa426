"""What will be trained how, before anything runs: a model's units on paper, and what they hold, need and send."""
