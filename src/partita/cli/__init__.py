"""The ``partita`` command: parsing and printing only."""
