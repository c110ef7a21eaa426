"""Optional package: fewer bytes between ranks, by quantization, low-rank factors, parameter deltas and local steps.

The core finds :data:`EXTENSION` here and imports nothing else of it. Each strategy is one file, with its plan (bytes,
operations, states) and its live object.
"""

from partita.compression.extension import CompressionExtension

EXTENSION = CompressionExtension()
