"""Checkpoints on a filesystem: files that torch.distributed.checkpoint reads, made visible by one rename."""
