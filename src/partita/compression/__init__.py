"""Optional package: compressed communication by quantization, low-rank factors, parameter deltas and local steps.

The core imports only :data:`EXTENSION`. Each strategy is one file, with its plan (bytes, operations, states) and its
running object.
"""

from partita.compression.extension import CompressionExtension

EXTENSION = CompressionExtension()
