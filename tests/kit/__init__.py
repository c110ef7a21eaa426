"""What the tests share: ranks, models, plans, training, states."""
