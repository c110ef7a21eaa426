"""The optimizer step, on this rank's shards of master weights and states. Knows no stage and no compression."""
