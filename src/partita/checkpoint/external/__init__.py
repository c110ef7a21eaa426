"""Readers of other libraries' checkpoints: one module per layout, each producing a
:class:`~partita.checkpoint.backend.Stored` with partita's own keys.
"""
