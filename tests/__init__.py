"""Tests of partita: a folder for each package, `features/` for several packages at once, and the `kit` that all use."""
