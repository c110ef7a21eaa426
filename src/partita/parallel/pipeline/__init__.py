"""Pipeline: each rank runs some of the model's blocks, and the micro-batches go from rank to rank."""
