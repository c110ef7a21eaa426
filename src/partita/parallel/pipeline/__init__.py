"""Pipeline parallelism: each rank runs some of the model's blocks, and micro-batches pass from rank to rank."""
