"""Changes to the modules of a model that can be suspended and undone."""
