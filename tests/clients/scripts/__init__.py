"""Training scripts as people write them with accelerate. None of them knows of partita.

Each prints lines ``loss <number>`` on rank 0.
"""
