"""Tests of partita: one folder per package, `features/` for tests across packages, and shared helpers in `kit`."""
