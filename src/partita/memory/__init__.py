"""Memory: slots lent without allocation, CUDA streams, and the ledger of who holds which bytes."""
