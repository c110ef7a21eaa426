"""Memory of one process: devices, buffer pools, tiers, the disk, streams, and the ledger. Knows no units and no other
ranks.
"""
