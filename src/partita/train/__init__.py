"""The trainer behind ``partita train``: a job file in; metrics, a plot, a sample and trained weights out. Uses public
calls of the engine only.
"""
