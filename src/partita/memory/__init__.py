"""Memory: buffer pools, long-lived allocations, the disk tier, streams, and the ledger of all allocated bytes."""
