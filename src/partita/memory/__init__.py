"""Memory: slots lent without allocation, memory that stays, the disk, streams, and the ledger of who holds what."""
