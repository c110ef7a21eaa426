"""Training scripts as users write them with accelerate or a library's trainer. None of them uses partita.

Each prints lines ``loss <number>`` on rank 0.
"""
