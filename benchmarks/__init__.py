"""One script a question; each prints its answer, and has a `--quick` form."""
