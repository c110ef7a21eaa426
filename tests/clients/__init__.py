"""Unchanged training scripts have the same losses on partita as with plain accelerate (DDP), to 1e-5.

`make test-clients` installs the libraries that these scripts use and runs them, on two processes at stages 1 and 3.
Other test runs leave them out.
"""
