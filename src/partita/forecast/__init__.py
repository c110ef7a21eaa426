"""What training a model will hold, send and take, found before it runs: from a model without weights and a machine."""
