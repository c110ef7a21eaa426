"""Checkpoints of other libraries: one file for each layout, which ends in a :class:`~partita.checkpoint.backend.Stored`
with partita's own keys.
"""
