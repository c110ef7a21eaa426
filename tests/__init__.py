"""partita's tests: pure ones by package, `local/` with gloo processes, and the architecture's own."""
